"""Matrices in four bits a number (MXFP4): 32 of a row share a scale, a power of two. Read, never written.

Files have `NAME_blocks` uint8 [experts, rows, columns / 32, 16], two numbers a byte, the lower half first, and
`NAME_scales` uint8 [experts, rows, columns / 32] in place of `NAME` [experts, columns, rows].
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero
BIAS, NOT_A_NUMBER = 127, 255  # of a scale's exponent; what it is where there is none
BLOCK = 32  # numbers of a scale


class Bytes(Protocol):
    """uint8 on disk."""

    @property
    def label(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: Any) -> Tensor: ...


class UnpackedSource:
    """One expert's matrix [columns, rows] in bfloat16, which holds every such number but the largest: those become
    infinite, and readers refuse them. Indexing unpacks all of it."""

    dtype = torch.bfloat16

    def __init__(self, blocks: Bytes, scales: Bytes) -> None:
        """blocks [rows, columns / 32, 16], scales [rows, columns / 32]"""
        self._blocks, self._scales = blocks, scales
        self.label = blocks.label
        rows, groups, _ = blocks.shape
        self.shape = groups * BLOCK, rows

    def __getitem__(self, index: Any) -> Tensor:
        return unpacked(self._blocks[:], self._scales[:]).t()[index]


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [rows, columns] of blocks uint8 [rows, columns / 32, 16] and scales uint8 [rows, columns / 32]."""
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    exponents = scales.int() - BIAS
    found = torch.ldexp(table[numbers.int()], exponents[..., None])
    found[scales == NOT_A_NUMBER] = torch.nan
    return found.flatten(1).to(torch.bfloat16)
