"""Losses whose value, gradient and metrics are formed in one pass over the tokens, beside their composed forms."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mrl.algo.policy_loss import EVERY_LOSS, ONE_PASS, PolicyInputs, TokenLoss, composed
from mrl.kernels.clipped_loss import Clip, clipped_loss, fits


def vanilla(
    loss: partial[TokenLoss], t: PolicyInputs, weights: Tensor, metric_weights: Tensor
) -> tuple[Tensor, Tensor] | None:
    """See `mrl.algo.policy_loss_token.vanilla`, which says what is wrong with its options, too."""
    low, high, ceiling = (loss.keywords[key] for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"))
    vectors = (t.log_probs, t.old_log_probs, t.advantages, weights, metric_weights)
    if ceiling <= 1 or not fits(*vectors):
        return None
    log_probs, old, advantages, weights, metric_weights = (x.reshape(-1) for x in vectors)

    def of_block(block: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        inputs = PolicyInputs(block, old[rows], advantages[rows], None, None)
        value, metrics = composed(loss, inputs, weights[rows], metric_weights[rows])
        return value, torch.stack([metrics[name] for name in EVERY_LOSS])

    return clipped_loss(log_probs, old, advantages, weights, metric_weights, Clip(low, high, ceiling), of_block)


ONE_PASS["vanilla"] = vanilla
