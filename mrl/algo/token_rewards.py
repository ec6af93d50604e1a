"""Token rewards from one score per response."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algo.stats import check_same_shape


def compute(
    scores: Tensor,
    response_mask: Tensor,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    early: Tensor | None = None,
) -> Tensor:
    """Returns [B, T]: the score on each response's last valid token, minus `kl_coef * kl` on every valid token.

    scores [B] float32; response_mask [B, T] bool or 0/1; kl [B, T] from `mrl.algo.kl.penalty`, with
    `use_kl_in_reward` (arXiv 1909.08593). early [B, T]: parts of the score given before the end, at the tokens after
    which they were given; the remainder is on the last token. A response without a valid token has its score in column
    0, so that it still counts in its group's statistics; gae does not read it.
    Raises ValueError for shapes that do not fit.
    """
    mask = response_mask.bool()
    if scores.shape != mask.shape[:1]:
        raise ValueError(f"scores is {list(scores.shape)}, response_mask {list(mask.shape)}: not [B], [B, T]")
    position = torch.arange(mask.shape[1], device=mask.device)
    last = (position * mask).amax(1, keepdim=True)
    rest = scores
    if early is not None:
        check_same_shape(early=early, response_mask=mask)
        early = early.masked_fill(~mask, 0)
        rest = scores - early.sum(1)
    rewards = torch.zeros(mask.shape, dtype=scores.dtype, device=scores.device).scatter_(1, last, rest[:, None])
    if early is not None:
        rewards = rewards + early
    if kl is not None:
        check_same_shape(kl=kl, response_mask=mask)
        rewards = rewards - kl_coef * kl.detach().masked_fill(~mask, 0)
    return rewards
