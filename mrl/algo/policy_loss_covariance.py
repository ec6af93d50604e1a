"""Policy losses that treat the few tokens with high covariance of log-prob and advantage differently.

Raising those tokens' probabilities is what uses up the policy's entropy (arXiv 2505.22617). `mrl.algo.token_choice`
picks the tokens from the whole mini-batch (verl picks from each micro-batch). As in verl and the paper, the log-ratio
is not clamped: a ratio beyond float32 makes the loss infinite, and the update is skipped.
"""

from __future__ import annotations

from torch import Tensor

from mrl.algo.policy_loss import LOSSES, PolicyInputs, TokenLoss
from mrl.algo.policy_loss_token import clipped_surrogate


@LOSSES.register("clip_cov")
def clip_cov(t: PolicyInputs, clip_ratio_low: float, clip_ratio_high: float) -> TokenLoss:
    """Clip-Cov: PPO's clipped surrogate, 0 at the chosen tokens. clipfrac: the chosen tokens (as in verl, not PPO's
    clipped ones).
    """
    chosen = _chosen("clip_cov", t)
    surrogate, _ = clipped_surrogate(t.log_ratio.exp(), t.advantages, clip_ratio_low, clip_ratio_high)
    return TokenLoss(surrogate.masked_fill(chosen, 0), chosen)


@LOSSES.register("kl_cov")
def kl_cov(t: PolicyInputs, ppo_kl_coef: float) -> TokenLoss:
    """KL-Cov: -A * ratio, unclipped, plus ppo_kl_coef * |log-ratio| at the chosen tokens. clipfrac: the chosen
    tokens.
    """
    chosen = _chosen("kl_cov", t)
    pull = (ppo_kl_coef * t.log_ratio.abs()).masked_fill(~chosen, 0)
    return TokenLoss(-t.advantages * t.log_ratio.exp() + pull, chosen)


def _chosen(name: str, t: PolicyInputs) -> Tensor:
    if t.chosen is None:
        raise ValueError(f"policy loss {name!r} needs `chosen`: see mrl.algo.token_choice")
    return t.chosen
