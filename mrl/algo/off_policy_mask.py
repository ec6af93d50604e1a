"""Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, eq. 9): bad responses that the policy has left behind
teach nothing more."""

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
    """[n] bool: False where A < 0 and the mean over the response of (sampling - present log-prob) is above `threshold`.

    All [n] flat. sampling_log_probs: of the policy that drew the tokens, the engine's: the mean then counts both its
    distance from the trainer and the updates made since (so does TRL's `off_policy_mask_threshold` with an engine).
    Multiply the policy loss with it: denominators stay, and so do entropy and KL terms, as in TRL. Raises ValueError
    for shapes that differ or a threshold that is not positive.
    """
    if threshold <= 0:
        raise ValueError(f"the threshold of the off-policy mask must be > 0, got {threshold}")
    check_same_shape(log_probs=log_probs, sampling_log_probs=sampling_log_probs, advantages=advantages)
    distance = sequences.mean((sampling_log_probs - log_probs)[None])[0]
    return (advantages >= 0) | (distance <= threshold)
