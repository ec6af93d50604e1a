"""Accuracy of a reward model's scores on rows of a file, for `mrl eval reward`."""

from mrl.scoring.accuracy import Judged, Report, report
from mrl.scoring.measure import judge, theirs
from mrl.scoring.show import lines

__all__ = ["Judged", "Report", "judge", "lines", "report", "theirs"]
