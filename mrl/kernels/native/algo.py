"""Advantages and PPO's loss with `advantages.c` and `loss.c`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.kernels import native

FURTHEST = 80.0  # largest log-ratio for which e^x is accurate
SUMS = 6


class _Clip(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("low", "high", "ceiling", "furthest")]


def supports(*tensors: Tensor) -> bool:
    """Returns True if the functions below support these tensors, besides masks."""
    return native.supports_float32_tensors(*tensors) and all(x.is_contiguous() for x in tensors)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, decay: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns (advantages [B, T], advantages + values, the advantages' moments for whitening); None for a mask with
    holes.

    The moments are count, sum and sum of squares over the mask, [3] float64. mask [B, T] bool; all tensors are
    contiguous.
    """
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    found = torch.empty(3, dtype=torch.float64)
    given = (rewards, values, mask, float(gamma), float(decay), advantages, returns, found, *rewards.shape)
    return (advantages, returns, found) if native.call("gae", *given) else None


def whiten_(x: Tensor, mask: Tensor, mean: float, scale: float, shift: float) -> None:
    """Sets x [B, T] to (x - mean) * scale + shift, 0 outside the bool mask; both contiguous."""
    native.call("whiten", x, mask, float(mean), float(scale), float(shift), x.numel())


def on_tokens(column: Tensor, mask: Tensor) -> Tensor:
    """Returns [B, T]: the row's value of column [B] where the mask [B, T] is True, 0 elsewhere. The mask is bool and
    contiguous.
    """
    out = column.new_empty(mask.shape)
    native.call("on_tokens", column, mask, out, *mask.shape)
    return out


def clipped_loss(vectors: Sequence[Tensor], clip: tuple[float, float, float, float]) -> tuple[Tensor, Tensor]:
    """Returns ([6] float64, gradient [n]) of `mrl.kernels.clipped_loss`, from its five vectors and a Clip's fields."""
    gradient, sums = torch.empty_like(vectors[0]), torch.empty(SUMS, dtype=torch.float64)
    native.call("clipped_loss", *vectors, _Clip(*clip), gradient, sums, gradient.numel())
    return sums, gradient
