"""Which rank is slow: every rank's own time by section, gathered every few steps.

Time is what the rank itself has worked (`platform.busy_seconds`), because in step with its peers a fast rank only waits
longer. A GPU that is slow in itself shows in a fixed piece of work that every rank times on its device, also where
collectives inside its passes make its peers wait for it there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mrl import platform

DEVICE = "device"
TIMED = ("rollout", "update", "sync", "checkpoint", DEVICE)
JUDGED = ("update", DEVICE)  # in the others rank 0 has work of its own
_TOO_SHORT_S = 1e-4  # to be compared

Gather = Callable[[Sequence[float]], list[list[float]]]


@dataclass
class Stragglers:
    """gather: a rank's numbers to all ranks; collective. peers: the same number on ranks that have the same work."""

    gather: Gather
    peers: int
    every_steps: int
    ratio: float
    _busy: dict[str, float] = field(default_factory=dict)
    _steps: int = 0

    @contextmanager
    def timed(self, section: str) -> Iterator[None]:
        """Adds the seconds of work of a part of the step to its section, also where it fails."""
        began = platform.busy_seconds()
        try:
            yield
        finally:
            self._busy[section] = self._busy.get(section, 0.0) + platform.busy_seconds() - began

    def end_of_step(self) -> Report | None:
        """Every `every_steps` steps what the ranks needed in them. Collective then."""
        self._steps += 1
        if self._steps < self.every_steps:
            return None
        mine = [self._busy.get(name, 0.0) for name in TIMED[:-1]]
        rows = self.gather([float(self.peers), *mine, platform.probe_seconds()])
        seconds = {name: [row[1 + column] for row in rows] for column, name in enumerate(TIMED)}
        report = Report([int(row[0]) for row in rows], seconds, self._steps, self.ratio)
        self._busy, self._steps = {}, 0
        return report


@dataclass(frozen=True)
class Report:
    """peers, and seconds by section: a number a rank. steps: over which they are summed (not for the device)."""

    peers: list[int]
    seconds: dict[str, list[float]]
    steps: int
    ratio: float

    def slowest(self) -> tuple[float, int, str]:
        """(times the median of its peers, rank, section) of the rank that stands out most; 1.0 if none has peers."""
        found = [(1.0, 0, JUDGED[0])]
        for section in JUDGED:
            for rank, value in enumerate(self.seconds[section]):
                median = self._median(section, self.peers[rank])
                if median > _TOO_SHORT_S:
                    found.append((value / median, rank, section))
        return max(found)

    def metrics(self) -> dict[str, float]:
        """How many times its peers' median the slowest rank needs, and which one it is."""
        slowdown, rank, _ = self.slowest()
        return {"straggler/slowdown": slowdown, "straggler/slowest_rank": float(rank)}

    def note(self) -> str | None:
        """For the user, when a rank is slower than it should be."""
        slowdown, rank, section = self.slowest()
        if slowdown < self.ratio:
            return None
        mine, median = self.seconds[section][rank], self._median(section, self.peers[rank])
        what = "a fixed piece of work on its device" if section == DEVICE else f"{section} over {self.steps} steps"
        return f"slow rank {rank}: {mine:.3g} s for {what}, {slowdown:.1f} times its peers' median of {median:.3g} s"

    def _median(self, section: str, peers: int) -> float:
        """Of two, the smaller."""
        values = [value for value, other in zip(self.seconds[section], self.peers) if other == peers]
        return statistics.median_low(values)
