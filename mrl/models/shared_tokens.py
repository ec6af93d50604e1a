"""Tokens that several sequences begin with: `spread` of `mrl.core.PackedBatch`, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl import platform
from mrl.units import starts


@dataclass(frozen=True)
class SharedTokens:
    """Whole sequences [T] of tokens [t], some of which begin alike.

    index [T]: the token at each place; first [t]: each token's first place
    slot [T]: all places of each token, one token after the other; begin [t]: where a token's begin in these
    """

    index: Tensor
    first: Tensor
    slot: Tensor
    begin: Tensor

    @classmethod
    def make(cls, spread: Tensor, device: torch.device) -> SharedTokens:
        """spread: as in `mrl.core.PackedBatch`."""
        return cls(*platform.to_device([spread, is_first(spread).nonzero()[:, 0], *slots_of(spread)], device))


def slots_of(index: Tensor) -> tuple[Tensor, Tensor]:
    """(slots of the tokens that `index` names, one token after the other, and where each one's begin)."""
    return index.argsort(stable=True), starts(index.bincount())


def is_first(spread: Tensor) -> Tensor:
    """[T] bool: whether a token has here the first of its places. spread: as in `mrl.core.PackedBatch`."""
    before = F.pad(spread.cummax(0).values[:-1], (1, 0), value=-1)
    return spread > before
