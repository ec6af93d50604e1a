"""Matrices in four bits a number (MXFP4): 32 numbers of a row share a scale, a power of two. Read, never written.

Files have `NAME_blocks` uint8 [experts, rows, columns / 32, 16], two numbers a byte, the lower half first, and
`NAME_scales` uint8 [experts, rows, columns / 32] in place of `NAME` [experts, columns, rows].
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and their negatives
BIAS, NOT_A_NUMBER = 127, 255  # exponent bias of a scale; scale that encodes NaN
BLOCK = 32  # numbers that share a scale


class Bytes(Protocol):
    """uint8 tensor on disk."""

    @property
    def label(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class UnpackedSource:
    """One expert's matrix [columns, rows] in bfloat16, which represents every MXFP4 number except the largest: those
    become infinite, and readers refuse them. Indexing unpacks the whole matrix.
    """

    dtype = torch.bfloat16

    def __init__(self, blocks: Bytes, scales: Bytes) -> None:
        """Takes blocks [rows, columns / 32, 16] and scales [rows, columns / 32]."""
        self._blocks, self._scales = blocks, scales
        self.label = blocks.label
        rows, groups, _ = blocks.shape
        self.shape = groups * BLOCK, rows

    def __getitem__(self, index: Any) -> Tensor:
        return unpacked(self._blocks[:], self._scales[:]).t()[index]


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns bfloat16 [rows, columns] from blocks uint8 [rows, columns / 32, 16] and scales uint8 [rows, columns /
    32].
    """
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.int() - BIAS
    found = torch.ldexp(table[numbers.int()], exponents[..., None])
    found[scales == NOT_A_NUMBER] = torch.nan
    return found.flatten(1).to(torch.bfloat16)
