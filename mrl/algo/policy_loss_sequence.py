"""Policy losses of a whole response's ratio, spread over its tokens.

Both are meant for the seq-mean-token-mean aggregate: each token then has its share of its response's value and
gradient. What they need of the whole response carries no gradient, so tokens may lie in any split.
"""

from __future__ import annotations

import torch

from mrl.algo.policy_loss import LOSSES, PolicyInputs, TokenLoss
from mrl.algo.policy_loss_token import clipped_surrogate
from mrl.algo.sequences import Sequences

GSPO_LOG_RATIO_MAX = 10.0


@LOSSES.register("gspo")
def gspo(t: PolicyInputs, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> TokenLoss:
    """Group sequence policy optimisation (GSPO, arXiv 2507.18071): PPO's clip on the response's length-normalised ratio
    s = exp(mean log-ratio).

    Its token form: log s_t = log_prob - stop_gradient(log_prob) + stop_gradient(mean log-ratio), at most 10. All tokens
    of a response have the same ratio, and each its own gradient and advantage (verl; in OpenRLHF and slime gradient
    flows through the mean, which is the same where the advantage is one a response). No dual clip. The paper's bounds
    are 3e-4 and 4e-4. clipfrac: the clipped term is the larger one.
    """
    mean = _sequences("gspo", t).mean((t.log_probs - t.old_log_probs)[None])[0]
    log_ratio = t.log_probs - t.log_probs.detach() + mean
    ratio = log_ratio.clamp(max=GSPO_LOG_RATIO_MAX).exp()
    return TokenLoss(*clipped_surrogate(ratio, t.advantages, clip_ratio_low, clip_ratio_high))


@LOSSES.register("geo_mean")
def geo_mean(t: PolicyInputs, clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2) -> TokenLoss:
    """Geometric-mean policy optimisation (GMPO, arXiv 2507.20673): -A * exp(mean of the clipped log-ratios), A the
    response's mean advantage.

    A token's log-ratio is clipped to [-low, high], and only where it has moved in the direction of its advantage. The
    paper's bounds are 0.4 and 0.4. clipfrac: log-ratios outside the bounds where A > 0; clipfrac_lower: where A < 0.
    """
    log_ratio = t.log_ratio
    bounded = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    sign = t.advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * bounded)
    mean, advantage = _sequences("geo_mean", t).mean(torch.stack([clipped.detach(), t.advantages]))
    outside = log_ratio != bounded
    value = -advantage * mean.exp() * (1 + clipped - clipped.detach())
    return TokenLoss(value, outside & (t.advantages > 0), outside & (t.advantages < 0))


def _sequences(name: str, t: PolicyInputs) -> Sequences:
    if t.sequences is None:
        raise ValueError(f"policy loss {name!r} is of whole responses: pass `sequences`")
    return t.sequences
