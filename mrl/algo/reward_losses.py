"""Losses of reward models: functions of the scores of whole responses, or of the scores at the ends of their steps.

Every loss takes scores [..., n] (with, say, a leading dimension for heads) and returns [..., units]: pairs, lists,
responses or steps, over which the caller averages. Values and gradients stay finite for scores that differ by
hundreds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from mrl.algo.registry import Registry
from mrl.algo.stats import check_same_shape

RewardLoss = Callable[..., Tensor]
REWARD_LOSSES: Registry[RewardLoss] = Registry("loss of a reward model")


@dataclass(frozen=True)
class ScorePairs:
    """chosen, rejected [..., P]: scores; margin [P]: the required lead of the chosen one."""

    chosen: Tensor
    rejected: Tensor
    margin: Tensor

    def __post_init__(self) -> None:
        check_same_shape(chosen=self.chosen, rejected=self.rejected)
        if self.margin.shape != self.chosen.shape[-1:]:
            raise ValueError(f"margin {tuple(self.margin.shape)} is not of {self.chosen.shape[-1]} pairs")


@dataclass(frozen=True)
class ScoreLists:
    """Ragged lists in one padded table.

    scores [..., L, m]; ranks [L, m]: 1 is the best, equal ranks are ties; present [L, m] bool, left-aligned
    """

    scores: Tensor
    ranks: Tensor
    present: Tensor

    @property
    def better(self) -> Tensor:
        """[L, m, m] bool: True where i is better than j."""
        both = self.present[:, :, None] & self.present[:, None, :]
        return both & (self.ranks[:, :, None] < self.ranks[:, None, :])


@dataclass(frozen=True)
class LabelledScores:
    """scores [..., n]; targets [n]: scores, or 1 for a good step and 0 for a bad one."""

    scores: Tensor
    targets: Tensor


def _won_by(lead: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(lead) - label_smoothing * logsigmoid(-lead)


@REWARD_LOSSES.register("bradley_terry")
def bradley_terry(t: ScorePairs, center_rewards_coefficient: float, label_smoothing: float) -> Tensor:
    """[..., P]: -log sigmoid(r_c - r_r - margin) + c (r_c + r_r)^2 (centring: arXiv 2312.09244)."""
    centring = center_rewards_coefficient * (t.chosen + t.rejected).square()
    return _won_by(t.chosen - t.rejected - t.margin, label_smoothing) + centring


@REWARD_LOSSES.register("plackett_luce")
def plackett_luce(t: ScoreLists, center_rewards_coefficient: float) -> Tensor:
    """[..., L]: the sum over the list of logsumexp of the entries that are not better - the entry's score.

    The worst entries add nothing. Ties count each other among the remaining entries (Breslow). For two entries without
    a tie it equals `bradley_terry`; centring uses twice the mean score.
    """
    left = t.present[:, :, None] & t.present[:, None, :] & (t.ranks[:, :, None] <= t.ranks[:, None, :])
    # an absent entry is compared with itself: a logsumexp of nothing has no gradient
    left = left | torch.eye(left.shape[-1], dtype=torch.bool, device=left.device)
    rest = t.scores[..., None, :].masked_fill(~left, -torch.inf).logsumexp(-1)
    drawn = torch.where(t.better.any(-1), rest - t.scores, 0.0).sum(-1)
    mean = torch.where(t.present, t.scores, 0.0).sum(-1) / t.present.sum(-1)
    return drawn + center_rewards_coefficient * (2 * mean).square()


@REWARD_LOSSES.register("pairwise")
def pairwise(t: ScoreLists, center_rewards_coefficient: float, label_smoothing: float) -> Tensor:
    """[..., L]: the mean of `bradley_terry` over the list's pairs with a better entry; 0 if there is none."""
    better, ours, theirs = t.better, t.scores[..., :, None], t.scores[..., None, :]
    each = _won_by(ours - theirs, label_smoothing) + center_rewards_coefficient * (ours + theirs).square()
    return torch.where(better, each, 0.0).sum((-2, -1)) / better.sum((-2, -1)).clamp(min=1)


@REWARD_LOSSES.register("regression")
def regression(t: LabelledScores) -> Tensor:
    """[..., n]: (score - target)^2."""
    return (t.scores - t.targets).square()


@REWARD_LOSSES.register("process")
def process(t: LabelledScores) -> Tensor:
    """[..., n]: binary cross-entropy of sigmoid(score) with the label."""
    return softplus(t.scores) - t.targets * t.scores
