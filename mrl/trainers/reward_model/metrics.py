"""Score metrics of a step before its update, or of held-out rows. Names are TRL's where TRL has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrl.algo.stats import correlation
from mrl.learner.reward import RewardTargets


def of_rows(t: RewardTargets, scores: Tensor, lengths: Tensor, sources: Sequence[str | None]) -> dict[str, float]:
    """Returns metrics of the scores; several heads count with their mean.

    scores [heads, S] float64; lengths [S]: response tokens of each score; sources: data source of each row
    """
    mean = scores.mean(0)
    found = {
        "rewards/mean": float(mean.mean()),
        "rewards/min": float(mean.min()),
        "rewards/max": float(mean.max()),
        "rewards/std": float(mean.std(correction=0)),
        "rewards/length_correlation": correlation(mean, lengths),
    }
    if len(scores) > 1:
        found["rewards/heads_std"] = float(scores.std(0, correction=0).mean())
    if t.form in ("pairs", "lists"):
        better, lead, longer = _comparisons(t, mean, lengths)
        by_length = {"chosen_longer": longer > 0, "chosen_shorter": longer < 0}
        found |= _shares(lead > 0, t.row_of[better], sources, by_length) | {"rewards/margins": float(lead.mean())}
    if t.form == "pairs":
        found |= {"rewards/chosen": float(mean[0::2].mean()), "rewards/rejected": float(mean[1::2].mean())}
    if t.form == "scores":
        found |= {"rewards/mse": float((mean - t.targets).square().mean())}
        found["rewards/target_correlation"] = correlation(mean, t.targets)
    if t.form == "steps":
        found |= _shares((mean > 0) == (t.targets > 0.5), t.row_of, sources, {})
    return found


def _comparisons(t: RewardTargets, scores: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (better text [C], its lead in score, its lead in length) for every untied pair of texts of a row."""
    table, is_there = t.table, t.present
    ranks = torch.cat([t.targets, t.targets.new_zeros(1)])[table]
    better = is_there[:, :, None] & is_there[:, None, :] & (ranks[:, :, None] < ranks[:, None, :])
    row, i, j = better.nonzero().T
    first, second = table[row, i], table[row, j]
    return first, scores[first] - scores[second], lengths[first] - lengths[second]


def _shares(
    right: Tensor, row_of: Tensor, sources: Sequence[str | None], groups: Mapping[str, Tensor]
) -> dict[str, float]:
    """Accuracies over all, by group, and by data source."""
    of_source = [sources[row] for row in row_of.tolist()]
    named = {f"source/{name}": name for name in sorted({name for name in of_source if name is not None})}
    by_source = {key: torch.tensor([name == each for each in of_source]) for key, name in named.items()}
    found = {
        f"rewards/accuracies/{name}": float(right[which].double().mean())
        for name, which in {**groups, **by_source}.items()
        if which.any()
    }
    return {"rewards/accuracies": float(right.double().mean()), **found}
