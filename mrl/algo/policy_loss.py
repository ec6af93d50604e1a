"""Policy losses by name. Each is a sum over tokens of weight * loss.

The weights carry the one global denominator of the mini-batch (`mrl.algo.aggregate.token_weights`), so the sum over any
split into micro-batches or ranks, and its gradient, is that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mrl.algo.registry import Registry
from mrl.algo.stats import check_same_shape

LOG_RATIO_BOUND = 20.0

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def compute(
    name: str,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    metric_weights: Tensor | None = None,
    **options: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss 0-d = sum(weights * token loss), metrics 0-d and detached) by the loss called `name`.

    All tensors have one shape, any shape (flat [R] in training); gradient flows through `log_probs` only. The metrics
    are sums over tokens too, with `metric_weights` (default `weights`): they add up over micro-batches and ranks, and
    they are means over tokens if those weights sum to 1 over the mini-batch (token-mean's do). `options` are the
    loss's own, see its docstring. Raises ValueError for an unknown name or shapes that differ.
    """
    loss = LOSSES.get(name)
    metric_weights = weights if metric_weights is None else metric_weights
    check_same_shape(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        weights=weights,
        metric_weights=metric_weights,
    )
    return loss(
        log_probs=log_probs,
        old_log_probs=old_log_probs.detach(),
        advantages=advantages.detach(),
        weights=weights,
        metric_weights=metric_weights,
        **options,
    )


@LOSSES.register("vanilla")
def vanilla(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    metric_weights: Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv 1707.06347) with the dual clip (arXiv 1912.09729).

    With ratio = exp(log_probs - old_log_probs): L = max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)), and where
    A < 0 at most -A * c. The log-ratio is clamped to +-20 before exp (verl, OpenRLHF; TRL, slime, NeMo-RL do not), so
    a token beyond that has no gradient.

    Metrics: clipfrac (the clipped term is the larger one), ppo_kl (old - new log-prob, the k1 estimate), clipfrac_lower
    (the dual clip is at work). Raises ValueError if clip_ratio_c <= 1.
    """
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c must be > 1 (dual clip), got {clip_ratio_c}")
    log_ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    surrogate = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip_ratio_c
    negative = advantages < 0
    token_loss = torch.where(negative, torch.minimum(surrogate, ceiling), surrogate)
    with torch.no_grad():
        metrics = {
            "clipfrac": ((clipped > unclipped) * metric_weights).sum(),
            "ppo_kl": (-log_ratio * metric_weights).sum(),
            "clipfrac_lower": ((negative & (surrogate > ceiling)) * metric_weights).sum(),
        }
    return (weights * token_loss).sum(), metrics
