"""Shares of correct answers from n samples a prompt, with bootstrap intervals over prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """Value with its 95 % confidence interval (percentiles of the bootstrap over prompts)."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, each: Sequence[float], seed: int = 0) -> Estimate:
        """Returns the mean of one number a prompt. Raises ValueError without any."""
        values = np.asarray(each, dtype=np.float64)
        if not len(values):
            raise ValueError("no prompts")
        rng = np.random.default_rng(seed)
        means = [values[rng.integers(0, len(values), len(values))].mean() for _ in range(RESAMPLES)]
        low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return cls(float(values.mean()), float(low), float(high))


def pass_at(k: int, right: Sequence[int], n: int) -> Estimate:
    """Unbiased probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374).

    right: number of correct ones among each prompt's n samples. Raises ValueError for k above n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples a prompt, there are {n}")
    return Estimate.of([1 - comb(n - c, k) / comb(n, k) for c in right])


def majority_at(k: int, answers: Sequence[Sequence[str]], right: Sequence[Sequence[bool]]) -> Estimate:
    """Probability that the most frequent of k answers is correct (self-consistency, arXiv 2203.11171).

    It is the mean over each prompt's consecutive groups of k samples; a tie counts with its share of correct answers.

    answers, right: of each prompt's samples; a remainder of fewer than k is left out. Raises ValueError for a prompt
    with fewer.
    """
    if any(len(texts) < k for texts in answers):
        raise ValueError(f"maj@{k} needs at least {k} samples of each prompt")
    each = []
    for texts, good in zip(answers, right, strict=True):
        groups = [range(first, first + k) for first in range(0, len(texts) - k + 1, k)]
        each.append(float(np.mean([_majority([texts[i] for i in g], [good[i] for i in g]) for g in groups])))
    return Estimate.of(each)


def _majority(texts: Sequence[str], right: Sequence[bool]) -> float:
    counts = Counter(texts)
    most = max(counts.values())
    is_right = dict(zip(texts, right, strict=True))
    winners = [text for text, count in counts.items() if count == most]
    return sum(is_right[text] for text in winners) / len(winners)
