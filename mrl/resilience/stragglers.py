"""Straggler detection: every rank's own work time by section, gathered every few steps.

Time is the rank's own work (`platform.busy_seconds`), since a fast rank in step with its peers only waits longer. A
slow GPU shows in a fixed piece of work that every rank times on its device, even if collectives inside its passes make
its peers wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mrl import platform

DEVICE = "device"
TIMED = ("rollout", "update", "sync", "checkpoint", DEVICE)
JUDGED = ("update", DEVICE)  # in the other sections rank 0 has extra work
_TOO_SHORT_S = 1e-4  # too short to compare

Gather = Callable[[Sequence[float]], list[list[float]]]


@dataclass
class StragglerDetector:
    """Collects work times."""

    gather: Gather  # gathers a rank's numbers on all ranks, collective
    peers: int  # equal on ranks with the same work
    every_steps: int
    ratio: float
    _busy: dict[str, float] = field(default_factory=dict)
    _steps: int = 0

    @contextmanager
    def timed(self, section: str) -> Iterator[None]:
        """Adds the work seconds of a part of the step to its section, even if it fails."""
        began = platform.busy_seconds()
        try:
            yield
        finally:
            self._busy[section] = self._busy.get(section, 0.0) + platform.busy_seconds() - began

    def end_of_step(self) -> StragglerReport | None:
        """Returns the ranks' times every `every_steps` steps, else None. Collective if due."""
        self._steps += 1
        if self._steps < self.every_steps:
            return None
        mine = [self._busy.get(name, 0.0) for name in TIMED[:-1]]
        rows = self.gather([float(self.peers), *mine, platform.probe_seconds()])
        seconds = {name: [row[1 + column] for row in rows] for column, name in enumerate(TIMED)}
        report = StragglerReport([int(row[0]) for row in rows], seconds, self._steps, self.ratio)
        self._busy, self._steps = {}, 0
        return report


@dataclass(frozen=True)
class StragglerReport:
    """Work times of all ranks."""

    peers: list[int]  # of each rank
    seconds: dict[str, list[float]]  # by section, of each rank
    steps: int  # summed over, except for the device
    ratio: float

    def slowest(self) -> tuple[float, int, str]:
        """Returns (ratio to the median of its peers, rank, section) of the slowest rank; ratio 1.0 if no rank has
        peers."""
        found = [(1.0, 0, JUDGED[0])]
        for section in JUDGED:
            for rank, value in enumerate(self.seconds[section]):
                median = self._median(section, self.peers[rank])
                if median > _TOO_SHORT_S:
                    found.append((value / median, rank, section))
        return max(found)

    def metrics(self) -> dict[str, float]:
        """Returns the slowest rank and its ratio to the median of its peers."""
        slowdown, rank, _ = self.slowest()
        return {"straggler/slowdown": slowdown, "straggler/slowest_rank": float(rank)}

    def note(self) -> str | None:
        """Returns a message for the user if a rank is slower than `ratio` allows."""
        slowdown, rank, section = self.slowest()
        if slowdown < self.ratio:
            return None
        mine, median = self.seconds[section][rank], self._median(section, self.peers[rank])
        what = "a fixed test computation" if section == DEVICE else f"{section} over {self.steps} steps"
        return f"slow rank {rank}: {mine:.3g} s for {what}, {slowdown:.1f} times its peers' median of {median:.3g} s"

    def _median(self, section: str, peers: int) -> float:
        """Median of a rank's peers; the smaller of two."""
        values = [value for value, other in zip(self.seconds[section], self.peers) if other == peers]
        return statistics.median_low(values)
