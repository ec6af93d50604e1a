"""Prefix tokens shared by several sequences: `shared_index` of `mrl.core.PackedBatch`, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl import platform
from mrl.units import starts


@dataclass(frozen=True)
class SharedTokens:
    """Whole sequences [T] of tokens [t], some of which share a prefix.

    index [T]: the token at each position; first [t]: each token's first position
    slot [T]: all positions of each token, token after token; begin [t]: the start of each token's positions
    """

    index: Tensor
    first: Tensor
    slot: Tensor
    begin: Tensor

    @classmethod
    def make(cls, shared_index: Tensor, device: torch.device) -> SharedTokens:
        """Builds the indices; shared_index: as in `mrl.core.PackedBatch`."""
        return cls(
            *platform.to_device([shared_index, is_first(shared_index).nonzero()[:, 0], *slots_of(shared_index)], device)
        )


def slots_of(index: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (slots of the tokens in `index`, token after token; the start of each token's slots)."""
    return index.argsort(stable=True), starts(index.bincount())


def is_first(shared_index: Tensor) -> Tensor:
    """Returns [T] bool: True at a token's first position. shared_index: as in `mrl.core.PackedBatch`."""
    before = F.pad(shared_index.cummax(0).values[:-1], (1, 0), value=-1)
    return shared_index > before
