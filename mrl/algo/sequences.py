"""Sums and means over whole responses of tokens that lie in any order, in several parts or on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def here(partial: Tensor) -> Tensor:
    """For responses that lie whole in one place."""
    return partial


@dataclass(frozen=True)
class Sequences:
    """Which response each of n tokens is of.

    member [n] int64: the number of its response, below B
    counted [n] bool: False for tokens that take no part, such as rejected ones
    lengths [B] int64: tokens that count of each whole response, wherever they lie
    total: adds up a tensor over all places that hold parts of the same responses (the context-parallel ranks); every
    place calls `sum` and `mean` equally often
    """

    member: Tensor
    counted: Tensor
    lengths: Tensor
    total: Callable[[Tensor], Tensor] = here

    @classmethod
    def of_mask(cls, mask: Tensor, keep: Tensor | None = None, total: Callable[[Tensor], Tensor] = here) -> Sequences:
        """Of the tokens of a [B, T] mask, row by row. keep [B, T]: which of them count; all where None."""
        mask = mask.bool()
        keep = mask if keep is None else keep & mask
        return cls(mask.nonzero()[:, 0], keep[mask], keep.sum(1), total)

    def at(self, places: Tensor) -> Sequences:
        """Of the tokens at some places only; the responses stay whole."""
        return replace(self, member=self.member[places], counted=self.counted[places])

    def to(self, device: torch.device) -> Sequences:
        return replace(
            self, member=self.member.to(device), counted=self.counted.to(device), lengths=self.lengths.to(device)
        )

    @torch.no_grad()
    def mean(self, values: Tensor) -> Tensor:
        """[k, n] -> [k, n]: at each token the mean over its whole response (0 where none counts); no gradient."""
        return (self._sums(values) / self.lengths.clamp(min=1))[:, self.member].to(values.dtype)

    @torch.no_grad()
    def sum(self, values: Tensor) -> Tensor:
        """[k, n] -> [k, n]: at each token the sum over its whole response; no gradient."""
        return self._sums(values)[:, self.member].to(values.dtype)

    def _sums(self, values: Tensor) -> Tensor:
        """[k, n] -> [k, B] float64."""
        inside = values.double().masked_fill(~self.counted, 0)
        return self.total(inside.new_zeros(values.shape[0], self.lengths.numel()).index_add_(1, self.member, inside))
