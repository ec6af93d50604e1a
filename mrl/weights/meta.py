"""What is known of an exported tensor before it is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorMeta:
    """A tensor of the exported model. `sender`: the world rank that has the whole tensor when it is streamed."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sender: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize
