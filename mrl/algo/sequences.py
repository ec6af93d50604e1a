"""Sums and means over whole responses whose tokens lie in any order, in several parts or on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


def local_total(partial: Tensor) -> Tensor:
    """Returns `partial`: the total of responses that lie whole on one rank."""
    return partial


@dataclass(frozen=True)
class Sequences:
    """Assignment of n tokens to B responses.

    member [n] int64: the number of the token's response, below B
    counted [n] bool: False for excluded tokens, such as rejected ones
    lengths [B] int64: counted tokens of each whole response, on all ranks
    total: adds up a tensor over all ranks that hold parts of the same responses (the context-parallel ranks); every
    such rank calls `sum` and `mean` equally often
    """

    member: Tensor
    counted: Tensor
    lengths: Tensor
    total: Callable[[Tensor], Tensor] = local_total

    @classmethod
    def of_mask(
        cls, mask: Tensor, keep: Tensor | None = None, total: Callable[[Tensor], Tensor] = local_total
    ) -> Sequences:
        """Builds the assignment for the tokens of a [B, T] mask, row by row. keep [B, T]: the tokens that count; all
        if None.
        """
        mask = mask.bool()
        keep = mask if keep is None else keep & mask
        return cls(mask.nonzero()[:, 0], keep[mask], keep.sum(1), total)

    def at(self, places: Tensor) -> Sequences:
        """Selects the tokens at `places`; the responses stay whole."""
        return replace(self, member=self.member[places], counted=self.counted[places])

    def to(self, device: torch.device) -> Sequences:
        return replace(
            self, member=self.member.to(device), counted=self.counted.to(device), lengths=self.lengths.to(device)
        )

    @torch.no_grad()
    def mean(self, values: Tensor) -> Tensor:
        """[k, n] -> [k, n]: at each token the mean over its whole response (0 if no token counts); no gradient."""
        return (self._sums(values) / self.lengths.clamp(min=1))[:, self.member].to(values.dtype)

    @torch.no_grad()
    def sum(self, values: Tensor) -> Tensor:
        """[k, n] -> [k, n]: at each token the sum over its whole response; no gradient."""
        return self._sums(values)[:, self.member].to(values.dtype)

    def _sums(self, values: Tensor) -> Tensor:
        """[k, n] -> [k, B] float64."""
        inside = values.double().masked_fill(~self.counted, 0)
        return self.total(inside.new_zeros(values.shape[0], self.lengths.numel()).index_add_(1, self.member, inside))
