"""From per-token losses to one number (`loss_agg_mode`).

T = valid tokens and B = responses with a valid token, both counted over the mask given: pass the mask of the *whole*
mini-batch, over all micro-batches and ranks. The weights then hold the global denominator, and a loss may be summed
in any parts. Responses without a single valid token are left out of B (verl; TRL counts them).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algo.registry import Registry
from mrl.algo.stats import check_same_shape

Weights = Callable[[Tensor, float | None], Tensor]
MODES: Registry[Weights] = Registry("loss aggregation mode")


def token_weights(mode: str, response_mask: Tensor, scale: float | None = None) -> Tensor:
    """[B, T] float32 weights with sum(weights * loss) == agg_loss(mode, loss, mask); 0 outside the mask.

    response_mask [B, T] bool or 0/1. scale: the loss_scale_factor of seq-mean-token-sum-norm, T when None; the other
    modes have none. An empty mask gives zeros. Raises ValueError for an unknown mode.
    """
    function = MODES.get(mode)
    if response_mask.dim() != 2:
        raise ValueError(f"response_mask must be [B, T], got {list(response_mask.shape)}")
    return function(response_mask.bool().float(), scale)


def agg_loss(mode: str, loss: Tensor, response_mask: Tensor, scale: float | None = None) -> Tensor:
    """The aggregate of `loss` [B, T], 0-d; whatever `loss` holds outside the mask is left out.

    Peers' defaults: verl and Megatron-LM token-mean, TRL a global token mean, slime the mean over each response's
    token mean. Dr.GRPO (arXiv 2503.20783) is seq-mean-token-sum-norm.
    """
    check_same_shape(loss=loss, response_mask=response_mask)
    inside = loss.masked_fill(~response_mask.bool(), 0)
    return (inside * token_weights(mode, response_mask, scale)).sum()


def _sequences(mask: Tensor) -> Tensor:
    """B, at least 1."""
    return (mask.sum(1) > 0).sum().clamp(min=1)


@MODES.register("token-mean")
def token_mean(mask: Tensor, scale: float | None) -> Tensor:
    """sum / T."""
    return mask / mask.sum(dtype=torch.float64).clamp(min=1).float()


@MODES.register("seq-mean-token-sum")
def seq_mean_token_sum(mask: Tensor, scale: float | None) -> Tensor:
    """sum / B."""
    return mask / _sequences(mask)


@MODES.register("seq-mean-token-mean")
def seq_mean_token_mean(mask: Tensor, scale: float | None) -> Tensor:
    """Mean over responses of each one's token mean."""
    return mask / mask.sum(1, keepdim=True).clamp(min=1) / _sequences(mask)


@MODES.register("token-sum")
def token_sum(mask: Tensor, scale: float | None) -> Tensor:
    """The sum."""
    return mask


@MODES.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(mask: Tensor, scale: float | None) -> Tensor:
    """sum / B / scale: a token counts the same in short and long responses (Dr.GRPO)."""
    return mask / _sequences(mask) / (mask.shape[1] if scale is None else scale)
