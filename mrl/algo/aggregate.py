"""Aggregation of per-token losses into one number (`loss_agg_mode`).

T = valid tokens and B = responses with a valid token, both of the *whole* mini-batch, over all micro-batches and ranks.
Pass the mask of the whole mini-batch, or the mask of some whole responses and the two counts. The weights then hold the
global denominator, so a loss may be summed in any parts. Responses without a valid token do not count in B (as in
verl; TRL counts them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algo.registry import Registry
from mrl.algo.stats import check_same_shape


@dataclass(frozen=True)
class Denominators:
    """tokens, sequences: T and B, at least 1; scale: the divisor of seq-mean-token-sum-norm."""

    tokens: Tensor | int
    sequences: Tensor | int
    scale: float


Weights = Callable[[Tensor, Denominators], Tensor]
MODES: Registry[Weights] = Registry("loss aggregation mode")


def token_weights(
    mode: str,
    response_mask: Tensor,
    scale: float | None = None,
    *,
    tokens: int | None = None,
    sequences: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Returns weights [B, T] of type `dtype` with sum(weights * loss) == agg_loss(mode, loss, mask); 0 outside the
    mask.

    response_mask [B, T] bool or 0/1. scale: the loss_scale_factor of seq-mean-token-sum-norm, T when None; other modes
    ignore it. tokens, sequences: the counts of the whole mini-batch, where the mask covers a part of it; counted over
    the mask when None. An empty mask gives zeros. Raises ValueError for an unknown mode, or for counts smaller than the
    mask's own.
    """
    function = MODES.get(mode)
    if response_mask.dim() != 2:
        raise ValueError(f"response_mask must be [B, T], got {list(response_mask.shape)}")
    mask = response_mask.bool()
    of = Denominators(
        _count("tokens", mask.sum(), tokens),
        _count("sequences", mask.any(1).sum(), sequences),
        float(mask.shape[1] if scale is None else scale),
    )
    return function(mask.to(torch.promote_types(dtype, torch.float32)), of).to(dtype)


def agg_loss(
    mode: str,
    loss: Tensor,
    response_mask: Tensor,
    scale: float | None = None,
    *,
    tokens: int | None = None,
    sequences: int | None = None,
) -> Tensor:
    """Returns the aggregate of `loss` [B, T], 0-d, ignoring values outside the mask. See `token_weights`.

    With `tokens` and `sequences` of the whole mini-batch the result is this part's share: the shares add up to the
    whole. Defaults elsewhere: verl and Megatron-LM token-mean, TRL a global token mean, slime the mean over each
    response's token mean. Dr.GRPO (arXiv 2503.20783) is seq-mean-token-sum-norm.
    """
    check_same_shape(loss=loss, response_mask=response_mask)
    inside = loss.masked_fill(~response_mask.bool(), 0)
    weights = token_weights(mode, response_mask, scale, tokens=tokens, sequences=sequences, dtype=loss.dtype)
    return (inside * weights).sum()


def _count(name: str, here: Tensor, whole: int | None) -> Tensor | int:
    if whole is None:
        return here.clamp(min=1)
    if whole < int(here):
        raise ValueError(f"{name}={whole} of the whole mini-batch, but the mask alone has {int(here)}")
    return max(whole, 1)


@MODES.register("token-mean")
def token_mean(mask: Tensor, of: Denominators) -> Tensor:
    """sum / T."""
    return mask / of.tokens


@MODES.register("seq-mean-token-sum")
def seq_mean_token_sum(mask: Tensor, of: Denominators) -> Tensor:
    """sum / B."""
    return mask / of.sequences


@MODES.register("seq-mean-token-mean")
def seq_mean_token_mean(mask: Tensor, of: Denominators) -> Tensor:
    """Mean over responses of each one's token mean."""
    return mask / mask.sum(1, keepdim=True).clamp(min=1) / of.sequences


@MODES.register("token-sum")
def token_sum(mask: Tensor, of: Denominators) -> Tensor:
    """The sum."""
    return mask


@MODES.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(mask: Tensor, of: Denominators) -> Tensor:
    """sum / B / scale: a token counts the same in short and long responses (Dr.GRPO)."""
    return mask / of.sequences / of.scale
