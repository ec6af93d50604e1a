"""Report as a table."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.scoring.accuracy import AccuracyReport


def lines(found: AccuracyReport) -> Iterator[str]:
    """Yields lines of text: subsets, RewardBench's sections with all subsets present, all rows, and the influence of
    length.
    """
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
