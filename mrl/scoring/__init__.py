"""Accuracy of a reward model's scores on rows of a file, for `mrl eval reward`."""

from mrl.scoring.accuracy import AccuracyReport, ScoredRow, lines, report
from mrl.scoring.measure import score_rows, score_with_transformers

__all__ = ["ScoredRow", "AccuracyReport", "score_rows", "lines", "report", "score_with_transformers"]
