"""Log-probabilities of tokens from plain logits (training uses `mrl.kernels.linear_logprob`, which stores no
logits).
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns (log-probs of the labels, entropies) of softmax(logits / temperature), both of the labels' shape.

    logits [..., V]; labels [...] int64. Computed in float32 or better; gradient flows through both results. Raises
    ValueError for shapes that do not fit or a temperature that is not positive.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {list(logits.shape)} and labels {list(labels.shape)}: not [..., V] and [...]")
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = torch.log_softmax(wide / temperature, -1)
    return log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
