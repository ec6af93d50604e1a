"""Policy losses of each token's own ratio."""

from __future__ import annotations

import torch
from torch import Tensor, expm1

from mrl.algo.policy_loss import LOSSES, PolicyInputs, TokenLoss

DPPO_EPS = 1e-8


@LOSSES.register("vanilla")
def vanilla(t: PolicyInputs, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float) -> TokenLoss:
    """PPO's clipped surrogate (arXiv 1707.06347) with the dual clip (arXiv 1912.09729).

    With ratio = exp(log_probs - old_log_probs): L = max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)), and at most
    -A * c where A < 0.

    clipfrac: tokens whose clipped term is the larger one; clipfrac_lower: tokens at the dual clip. Raises ValueError if
    clip_ratio_c <= 1.

    With old log-probs of the proximal policy (the trainer's, before the step's first update) and weights multiplied by
    exp(proximal - behaviour log-prob) this is the decoupled loss (arXiv 2505.24298); see `mrl.algo.rollout_correction`.
    """
    if clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c must be > 1 (dual clip), got {clip_ratio_c}")
    surrogate, clipped = clipped_surrogate(t.bounded_log_ratio.exp(), t.advantages, clip_ratio_low, clip_ratio_high)
    ceiling = -t.advantages * clip_ratio_c
    at_ceiling = (t.advantages < 0) & (surrogate > ceiling)
    return TokenLoss(torch.where(at_ceiling, ceiling, surrogate), clipped, at_ceiling)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Returns max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)) and a mask of the tokens whose second term is
    larger, in the inputs' shape.
    """
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


@LOSSES.register("gpg")
def gpg(t: PolicyInputs) -> TokenLoss:
    """Plain policy gradient, -A * log_prob (GPG, arXiv 2504.02546): no clipping, no ratio."""
    return TokenLoss(-t.advantages * t.log_probs)


@LOSSES.register("cispo")
def cispo(t: PolicyInputs, clip_ratio_low: float, clip_ratio_high: float) -> TokenLoss:
    """Clipped importance weights (CISPO, arXiv 2506.13585): -stop_gradient(clip(ratio, 1 - low, 1 + high)) * A *
    log_prob.

    Unlike in PPO, a clipped token keeps its gradient. The paper has no lower bound (low >= 1 here, as ratios are
    positive); neither does TRL, whose epsilon_high is the upper bound itself, 1 + high. clipfrac: ratios outside the
    bounds.
    """
    ratio = t.bounded_log_ratio.detach().exp()
    factor = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return TokenLoss(-factor * t.advantages * t.log_probs, factor != ratio)


@LOSSES.register("sapo")
def sapo(t: PolicyInputs, tau_pos: float, tau_neg: float) -> TokenLoss:
    """Soft adaptive policy optimisation (SAPO, arXiv 2511.20347): -A * sigmoid(tau * (ratio - 1)) * 4 / tau, with
    tau_pos where A > 0 and tau_neg elsewhere. At ratio 1 the gradient is the policy gradient.

    Meant for the seq-mean-token-mean aggregate. Raises ValueError for a tau that is not positive.
    """
    if min(tau_pos, tau_neg) <= 0:
        raise ValueError(f"tau_pos ({tau_pos}) and tau_neg ({tau_neg}) must be > 0")
    tau = torch.full_like(t.advantages, tau_neg).masked_fill_(t.advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (t.bounded_log_ratio.exp() - 1)) * 4 / tau
    return TokenLoss(-t.advantages * gate)


@LOSSES.register("dro")
def dro(t: PolicyInputs, dro_beta: float) -> TokenLoss:
    """Direct reward optimisation: -(A * log_prob - dro_beta / 2 * log_ratio^2), a quadratic penalty towards the
    sampling policy instead of clipping. Raises ValueError if dro_beta is not positive.
    """
    if dro_beta <= 0:
        raise ValueError(f"dro_beta must be > 0, got {dro_beta}")
    return TokenLoss(-(t.advantages * t.log_probs - 0.5 * dro_beta * t.log_ratio.square()))


@LOSSES.register("dppo_tv")
def dppo_tv(t: PolicyInputs, divergence_low: float, divergence_high: float, dppo_ratio_cap: float) -> TokenLoss:
    """DPPO (arXiv 2602.04879) with the total variation of "this token or another": |p - p_old|.

    -A * stop_gradient(min(ratio, dppo_ratio_cap)) * log_prob; 0 at tokens that have moved in the advantage's direction
    by more than divergence_high (A > 0) or divergence_low (else). clipfrac: those tokens;
    clipfrac_lower: remaining tokens whose ratio is above the cap (verl's `clip_ratio_c` there).
    """
    moved = (t.log_probs.exp() - t.old_log_probs.exp()).detach()
    kept = torch.where(t.advantages > 0, moved <= divergence_high, moved >= -divergence_low)
    return _trust_region(t, kept, dppo_ratio_cap)


@LOSSES.register("dppo_kl")
def dppo_kl(t: PolicyInputs, divergence_low: float, divergence_high: float, dppo_ratio_cap: float) -> TokenLoss:
    """DPPO as in `dppo_tv`, with the divergence KL(p_old || p) of "this token or another" for tokens that have moved in
    the advantage's direction.
    """
    new, old = t.log_probs.detach(), t.old_log_probs
    other_new, other_old = -expm1(new) + DPPO_EPS, -expm1(old) + DPPO_EPS
    divergence = old.exp() * (old - new) + -expm1(old) * (other_old / other_new).log()
    against = torch.where(t.advantages > 0, new <= old, new >= old)
    near = torch.where(t.advantages > 0, divergence <= divergence_high, divergence <= divergence_low)
    return _trust_region(t, against | near, dppo_ratio_cap)


def _trust_region(t: PolicyInputs, kept: Tensor, cap: float) -> TokenLoss:
    ratio = t.bounded_log_ratio.detach().exp()
    value = -t.advantages * ratio.clamp(max=cap) * t.log_probs
    return TokenLoss(torch.where(kept, value, 0), ~kept, kept & (ratio > cap))
