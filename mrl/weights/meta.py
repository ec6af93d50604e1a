"""Metadata of an exported tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COPIED = -1  # sender of a tensor that is copied from a file


@dataclass(frozen=True)
class TensorMeta:
    """Metadata of an exported tensor. `sender`: the world rank that holds the whole tensor when it is streamed, or
    COPIED.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sender: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize
