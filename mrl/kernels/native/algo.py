"""Advantages and PPO's loss by `advantages.c` and `loss.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.kernels import native

FURTHEST = 80.0  # a log-ratio: e^x is right up to there
SUMS = 6


class _Clip(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("low", "high", "ceiling", "furthest")]


def takes(*tensors: Tensor) -> bool:
    """Whether the functions below take these, beside masks."""
    return native.serves_float32(*tensors) and all(x.is_contiguous() for x in tensors)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, decay: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(advantages [B, T], advantages + values, what whitening wants of the first: count, sum and sum of squares over
    the mask, [3] float64) of rows that are all True, then all False; None: others are there. mask [B, T] bool,
    contiguous as all are."""
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    found = torch.empty(3, dtype=torch.float64)
    given = (rewards, values, mask, float(gamma), float(decay), advantages, returns, found, *rewards.shape)
    return (advantages, returns, found) if native.call("gae", *given) else None


def whiten_(x: Tensor, mask: Tensor, mean: float, scale: float, shift: float) -> None:
    """x becomes (x - mean) * scale + shift, 0 outside the mask, which is bool and contiguous as x is."""
    native.call("whiten", x, mask, float(mean), float(scale), float(shift), x.numel())


def on_tokens(column: Tensor, mask: Tensor) -> Tensor:
    """[B, T]: each row's one of column [B] where the mask [B, T] is, 0 elsewhere. The mask is bool and contiguous."""
    out = column.new_empty(mask.shape)
    native.call("on_tokens", column, mask, out, *mask.shape)
    return out


def clipped_loss(vectors: Sequence[Tensor], clip: tuple[float, float, float, float]) -> tuple[Tensor, Tensor]:
    """([6] float64, gradient [n]): what `mrl.kernels.clipped_loss` makes of its five vectors and a Clip's fields."""
    gradient, sums = torch.empty_like(vectors[0]), torch.empty(SUMS, dtype=torch.float64)
    native.call("clipped_loss", *vectors, _Clip(*clip), gradient, sums, gradient.numel())
    return sums, gradient
