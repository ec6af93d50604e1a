"""Accuracies from scores: by subset, by RewardBench's sections, and by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from mrl.algo.stats import correlation

# RewardBench (arXiv 2403.13787): sections of subsets, and what each counts in its own; math-prm has 447 rows, and
# counts as much as all code
SECTIONS: dict[str, dict[str, int]] = {
    "Chat": {
        "alpacaeval-easy": 100, "alpacaeval-length": 95, "alpacaeval-hard": 95, "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "Chat Hard": {
        "mt-bench-hard": 37, "llmbar-natural": 100, "llmbar-adver-neighbor": 134, "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47, "llmbar-adver-manual": 46,
    },
    "Safety": {
        "refusals-dangerous": 100, "refusals-offensive": 100, "xstest-should-refuse": 154,
        "xstest-should-respond": 250, "donotanswer": 136,
    },
    "Reasoning": {
        "math-prm": 984, **{f"hep-{name}": 164 for name in ("cpp", "go", "java", "js", "python", "rust")},
    },
}  # fmt: skip


@dataclass(frozen=True)
class ScoredRow:
    """A row. scores, tokens, quality (higher is better): of its responses, the best first; subset: None without one"""

    scores: tuple[float, ...]
    tokens: tuple[int, ...]
    quality: tuple[float, ...]
    subset: str | None

    @property
    def is_right(self) -> bool:
        """True if the best response has the highest score; a tie is wrong."""
        return self.margin > 0

    @property
    def margin(self) -> float:
        """Score of the best response minus the highest score of all worse ones."""
        worse = [score for score, good in zip(self.scores, self.quality, strict=True) if good < self.quality[0]]
        return self.scores[0] - max(worse)


@dataclass(frozen=True)
class AccuracyReport:
    """Accuracies of a reward model.

    accuracy, margin: of all rows; subsets: (name, rows, accuracy, margin); sections: RewardBench's sections with all
    subsets present; final: the mean of its four sections, None unless all are present
    longer, shorter: accuracy if the best response is the longer one of two, or the shorter one; None: no such rows
    length_correlation: of the scores with the responses' lengths
    """

    rows: int
    accuracy: float
    margin: float
    subsets: tuple[tuple[str, int, float, float], ...]
    sections: dict[str, float]
    final: float | None
    longer: float | None
    shorter: float | None
    length_correlation: float
    score_mean: float
    score_std: float


def report(judged: Sequence[ScoredRow]) -> AccuracyReport:
    """Returns the report on one or more rows."""
    names = sorted({row.subset for row in judged if row.subset is not None})
    subsets = []
    for name in names:
        of = [row for row in judged if row.subset == name]
        subsets.append((name, len(of), _accuracy(of), fmean(row.margin for row in of)))
    sections = _sections({name: accuracy for name, _, accuracy, _ in subsets})
    scores = torch.tensor([score for row in judged for score in row.scores], dtype=torch.float64)
    lengths = torch.tensor([count for row in judged for count in row.tokens], dtype=torch.float64)
    pairs = [row for row in judged if len(row.scores) == 2]
    longer = [row for row in pairs if row.tokens[0] > row.tokens[1]]
    shorter = [row for row in pairs if row.tokens[0] < row.tokens[1]]
    return AccuracyReport(
        rows=len(judged),
        accuracy=_accuracy(judged),
        margin=fmean(row.margin for row in judged),
        subsets=tuple(subsets),
        sections=sections,
        final=fmean(sections.values()) if len(sections) == len(SECTIONS) else None,
        longer=_accuracy(longer) if longer else None,
        shorter=_accuracy(shorter) if shorter else None,
        length_correlation=correlation(scores, lengths),
        score_mean=float(scores.mean()),
        score_std=float(scores.std(correction=0)),
    )


def lines(found: AccuracyReport) -> Iterator[str]:
    """Yields the report as a table: subsets, complete sections of RewardBench, all rows, the influence of length."""
    width = max([len("all rows"), *(len(name) for name, *_ in found.subsets), *map(len, found.sections)])
    yield f"{'':{width}}  {'rows':>6} {'accuracy':>9} {'margin':>9}"
    for name, rows, accuracy, margin in found.subsets:
        yield f"{name:{width}}  {rows:6} {accuracy:9.4f} {margin:9.4f}"
    for name, accuracy in found.sections.items():
        yield f"{name:{width}}  {'':6} {accuracy:9.4f}"
    if found.final is not None:
        yield f"{'RewardBench':{width}}  {'':6} {found.final:9.4f}"
    yield f"{'all rows':{width}}  {found.rows:6} {found.accuracy:9.4f} {found.margin:9.4f}"
    yield ""
    yield f"scores: mean {found.score_mean:.4f}, deviation {found.score_std:.4f}"
    parts = [
        f"{accuracy:.4f} where the best is {what}"
        for accuracy, what in ((found.longer, "longer"), (found.shorter, "shorter"))
        if accuracy is not None
    ]
    by_length = f"; accuracy {', '.join(parts)}" if parts else ""
    yield f"length: correlation with the score {found.length_correlation:.4f}{by_length}"


def _sections(accuracy: dict[str, float]) -> dict[str, float]:
    return {
        section: sum(accuracy[name] * count for name, count in counts.items()) / sum(counts.values())
        for section, counts in SECTIONS.items()
        if counts.keys() <= accuracy.keys()
    }


def _accuracy(rows: Sequence[ScoredRow]) -> float:
    return fmean(row.is_right for row in rows)
