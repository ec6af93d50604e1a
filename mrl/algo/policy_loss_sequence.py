"""Policy losses of a whole response's ratio, spread over its tokens.

gspo and geo_mean are meant for the seq-mean-token-mean aggregate: each token then has its share of its response's value
and gradient. Response-level quantities carry no gradient, so tokens may lie in any split.
"""

from __future__ import annotations

import math

import torch

from mrl.algo.policy_loss import LOG_RATIO_BOUND, LOSSES, PolicyInputs, TokenLoss, of_responses
from mrl.algo.policy_loss_token import clipped_surrogate
from mrl.algo.sequences import Sequences

GSPO_LOG_RATIO_MAX = 10.0
VESPO_LOG_RATIO_MIN = math.log(1e-8)


@LOSSES.register("gspo")
@of_responses
def gspo(t: PolicyInputs, clip_ratio_low: float, clip_ratio_high: float) -> TokenLoss:
    """Group sequence policy optimisation (GSPO, arXiv 2507.18071): PPO's clip on the response's length-normalised ratio
    s = exp(mean log-ratio).

    Its token form: log s_t = log_prob - stop_gradient(log_prob) + stop_gradient(mean log-ratio), at most 10. All tokens
    of a response have the same ratio, and each its own gradient and advantage, as in verl. In OpenRLHF and slime
    gradient flows through the mean, which is the same if a response has one advantage. No dual clip. clipfrac: tokens
    whose clipped term is the larger one.

    The paper and verl aggregate by seq-mean-token-mean; set any other aggregate explicitly (TRL's default is the mean
    over tokens).
    """
    mean = _sequences("gspo", t).mean((t.log_probs - t.old_log_probs)[None])[0]
    log_ratio = t.log_probs - t.log_probs.detach() + mean
    ratio = log_ratio.clamp(max=GSPO_LOG_RATIO_MAX).exp()
    return TokenLoss(*clipped_surrogate(ratio, t.advantages, clip_ratio_low, clip_ratio_high))


@LOSSES.register("geo_mean")
@of_responses
def geo_mean(t: PolicyInputs, clip_ratio_low: float, clip_ratio_high: float) -> TokenLoss:
    """Geometric-mean policy optimisation (GMPO, arXiv 2507.20673): -A * exp(mean of the clipped log-ratios), with A the
    response's mean advantage.

    A token's log-ratio is clipped to [-low, high] only if it has moved in the direction of its advantage. A log-ratio
    that has moved the other way is not bounded, as in the paper and in verl.
    clipfrac: log-ratios outside the bounds where A > 0; clipfrac_lower: where A < 0.
    """
    log_ratio = t.log_ratio
    bounded = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    sign = t.advantages.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * bounded)
    mean, advantage = _sequences("geo_mean", t).mean(torch.stack([clipped.detach(), t.advantages]))
    outside = log_ratio != bounded
    value = -advantage * mean.exp() * (1 + clipped - clipped.detach())
    return TokenLoss(value, outside & (t.advantages > 0), outside & (t.advantages < 0))


@LOSSES.register("vespo")
@of_responses
def vespo(
    t: PolicyInputs, vespo_k_pos: float, vespo_lambda_pos: float, vespo_k_neg: float, vespo_lambda_neg: float
) -> TokenLoss:
    """Variational sequence-level soft policy optimisation (VESPO, arXiv 2602.10693): -stop_gradient(phi(W)) * A *
    log_prob.

    W = exp(sum of the response's log-ratios), not normalised by length, and phi(W) = W^k * exp(lambda * (1 - W)), which
    is 1 at W = 1 and falls smoothly to 0 on either side. k_pos and lambda_pos apply where A >= 0, the others elsewhere.

    As in TRL a token's log-ratio is clamped to +-20 and log W to [log 1e-8, 20], and the mean over all tokens
    (token-mean) is the usual aggregate. Nothing is clipped. TRL multiplies the engine's importance weight into W; here
    W is the ratio to the engine's policy where old log-probs are the engine's. Raises ValueError for a k or lambda that
    is not positive.
    """
    if min(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg) <= 0:
        raise ValueError("vespo needs k and lambda > 0")
    log_w = _sequences("vespo", t).sum(t.bounded_log_ratio.detach()[None])[0]
    log_w = log_w.clamp(VESPO_LOG_RATIO_MIN, LOG_RATIO_BOUND)
    rises = t.advantages >= 0
    k = torch.full_like(log_w, vespo_k_neg).masked_fill_(rises, vespo_k_pos)
    scale = torch.full_like(log_w, vespo_lambda_neg).masked_fill_(rises, vespo_lambda_pos)
    phi = (k * log_w - scale * torch.expm1(log_w)).exp()
    return TokenLoss(-phi * t.advantages * t.log_probs)


def _sequences(name: str, t: PolicyInputs) -> Sequences:
    if t.sequences is None:
        raise ValueError(f"policy loss {name!r} is of whole responses: pass `sequences`")
    return t.sequences
