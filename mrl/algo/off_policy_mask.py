"""Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9): drops far off-policy responses of negative
advantage from the policy loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algo.sequences import Sequences
from mrl.algo.stats import check_same_shape


@torch.no_grad()
def keep(
    *,
    log_probs: Tensor,
    sampling_log_probs: Tensor,
    advantages: Tensor,
    sequences: Sequences,
    threshold: float,
) -> Tensor:
    """Returns a mask [n] bool: False where A < 0 and the response's mean of (sampling - current log-prob) exceeds
    `threshold`.

    All inputs are flat [n]. sampling_log_probs: the engine's, from when the tokens were generated. The mean then
    includes both the engine's distance from the trainer and the updates made since (as TRL's
    `off_policy_mask_threshold` with an engine). Multiply the policy loss by the mask: denominators, entropy and KL
    terms stay, as in TRL. Raises ValueError for shapes that differ or a threshold that is not positive.
    """
    if threshold <= 0:
        raise ValueError(f"the threshold of the off-policy mask must be > 0, got {threshold}")
    check_same_shape(log_probs=log_probs, sampling_log_probs=sampling_log_probs, advantages=advantages)
    distance = sequences.mean((sampling_log_probs - log_probs)[None])[0]
    return (advantages >= 0) | (distance <= threshold)
