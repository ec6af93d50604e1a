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
    they are means over tokens if those weights sum to 1 over the mini-batch (token-mean's do): clipfrac, ppo_kl
    (old - new log-prob, the k1 estimate), clipfrac_lower (PPO's dual clip). `options` are the loss's own, see its
    docstring. Raises ValueError for an unknown name or shapes that differ.
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

    clipfrac: the clipped term is the larger one; clipfrac_lower: the dual clip is at work. Raises ValueError if
    clip_ratio_c <= 1.
    """
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c must be > 1 (dual clip), got {clip_ratio_c}")
    log_ratio = _log_ratio(log_probs, old_log_probs)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    surrogate = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip_ratio_c
    at_ceiling = (advantages < 0) & (surrogate > ceiling)
    token_loss = torch.where(at_ceiling, ceiling, surrogate)
    return (weights * token_loss).sum(), _metrics(log_ratio, clipped > unclipped, at_ceiling, metric_weights)


@LOSSES.register("gpg")
def gpg(
    *, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, weights: Tensor, metric_weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient, -A * log_prob (GPG, arXiv 2504.02546): nothing is clipped, the ratio is not used."""
    log_ratio = _log_ratio(log_probs, old_log_probs)
    none = torch.zeros_like(log_ratio, dtype=torch.bool)
    return (weights * -advantages * log_probs).sum(), _metrics(log_ratio, none, none, metric_weights)


@LOSSES.register("cispo")
def cispo(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    metric_weights: Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped importance weights (CISPO, arXiv 2506.13585): -stop_gradient(clip(ratio, 1 - low, 1 + high)) * A *
    log_prob. Unlike PPO's, a clipped token keeps its gradient. clipfrac: the ratio is outside the bounds."""
    log_ratio = _log_ratio(log_probs, old_log_probs)
    ratio = log_ratio.detach().exp()
    factor = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    none = torch.zeros_like(ratio, dtype=torch.bool)
    return (weights * -factor * advantages * log_probs).sum(), _metrics(
        log_ratio, factor != ratio, none, metric_weights
    )


@LOSSES.register("sapo")
def sapo(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    metric_weights: Tensor,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft adaptive policy optimisation (SAPO, arXiv 2511.20347): -A * sigmoid(tau * (ratio - 1)) * 4 / tau, with
    tau_pos where A > 0 and tau_neg elsewhere. At ratio 1 the gradient is the policy gradient.

    Meant for the seq-mean-token-mean aggregate. Raises ValueError for a tau that is not positive.
    """
    if min(tau_pos, tau_neg) <= 0:
        raise ValueError(f"tau_pos ({tau_pos}) and tau_neg ({tau_neg}) must be > 0")
    log_ratio = _log_ratio(log_probs, old_log_probs)
    tau = torch.full_like(advantages, tau_neg).masked_fill_(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau
    none = torch.zeros_like(log_ratio, dtype=torch.bool)
    return (weights * -advantages * gate).sum(), _metrics(log_ratio, none, none, metric_weights)


@LOSSES.register("dro")
def dro(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    metric_weights: Tensor,
    dro_beta: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct reward optimisation: -(A * log_prob - dro_beta / 2 * log_ratio^2): a pull back to the policy that sampled
    in place of clipping. Raises ValueError if dro_beta is not positive."""
    if dro_beta <= 0:
        raise ValueError(f"dro_beta must be > 0, got {dro_beta}")
    difference = log_probs - old_log_probs
    token_loss = -(advantages * log_probs - 0.5 * dro_beta * difference.square())
    none = torch.zeros_like(difference, dtype=torch.bool)
    return (weights * token_loss).sum(), _metrics(_log_ratio(log_probs, old_log_probs), none, none, metric_weights)


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _metrics(log_ratio: Tensor, clipped: Tensor, at_ceiling: Tensor, weights: Tensor) -> dict[str, Tensor]:
    return {
        "clipfrac": (clipped * weights).sum(),
        "ppo_kl": (-log_ratio.detach() * weights).sum(),
        "clipfrac_lower": (at_ceiling * weights).sum(),
    }
