"""Losses whose value, gradient and metrics are computed in one pass over the tokens, beside their composed forms."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from mrl.algo.policy_loss import FUSED_LOSSES, LOG_RATIO_BOUND, PolicyInputs, TokenLoss
from mrl.kernels.clipped_loss import Clip, clipped_loss, supports_clipped_loss


def vanilla(
    loss: partial[TokenLoss], t: PolicyInputs, weights: Tensor, metric_weights: Tensor
) -> tuple[Tensor, Tensor] | None:
    """One-pass form of `mrl.algo.policy_loss_token.vanilla`, which reports invalid options; None for unsupported
    inputs.
    """
    low, high, ceiling = (loss.keywords[key] for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
    vectors = (t.log_probs, t.old_log_probs, t.advantages, weights, metric_weights)
    if ceiling <= 1 or not supports_clipped_loss(*vectors):
        return None
    log_probs, old, advantages, weights, metric_weights = (x.reshape(-1) for x in vectors)
    clip = Clip(low, high, ceiling, LOG_RATIO_BOUND)
    return clipped_loss(log_probs, old, advantages, weights, metric_weights, clip)


FUSED_LOSSES["vanilla"] = vanilla
