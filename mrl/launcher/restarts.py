"""Log of a run's restarts, one line each, read from the sections that its ranks report."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from mrl.launcher.logs import RankLog, collect_failures, root_cause
from mrl.resilience.protocol import RankStatus, read_statuses, remove_statuses
from mrl.terminal import Terminal

_SLACK_S = 0.2  # between the rank's own clock of a section and its monitor's


@dataclass(frozen=True)
class Fault:
    """End of an attempt. section: the rank's section, None between two sections."""

    kind: Literal["died", "failed", "hung"]
    ranks: tuple[int, ...]
    section: str | None
    text: str
    unix_time: float


class RestartTracker:
    """Tracks restarts. limits: seconds a section may last. record: file that gets a JSON line a restart."""

    def __init__(
        self, logs: Sequence[RankLog], limits: Mapping[str, float], allowed: int, record: Path, terminal: Terminal
    ) -> None:
        self._logs, self._limits, self._allowed, self._record = logs, limits, allowed, record
        self._dir, self._terminal = logs[0].path.parent, terminal
        self._attempt = 0
        self._recovering: Fault | None = None
        self.fault: Fault | None = None  # of the current attempt
        self._statuses: list[RankStatus] = []
        remove_statuses(self._dir)  # of an earlier launch

    def poll(self) -> None:
        """Reads the ranks' sections; reports when they have recovered from a fault."""
        self._statuses = read_statuses(self._dir)
        if self._statuses and self._statuses[0].attempt > self._attempt:
            self._say_failed_again()
            unseen = Fault("died", (), None, "a rank ended", time.time())
            self._recovering, self.fault, self._attempt = self.fault or unseen, None, self._statuses[0].attempt
        is_running = all(status.section != "setup" for status in self._statuses)
        if self._recovering is not None and is_running and len(self._statuses) == len(self._logs):
            self._say(self._recovering, time.time() - self._recovering.unix_time)
            self._recovering = None
        if self.fault is None:
            lost = [status for status in self._statuses if not status.ended and not _is_alive(status.pid)]
            self.fault = self._diagnose(lost) if lost else None

    def finish(self) -> None:
        """Called after the launcher's end; a fault without a restart remains in `fault`."""
        self.poll()
        self._say_failed_again()

    def _say_failed_again(self) -> None:
        if self._recovering is not None:
            self._say(self._recovering, None)

    def _diagnose(self, lost: Sequence[RankStatus]) -> Fault:
        now = time.time()
        silent = [status for status in lost if not self._logs[status.rank].failure_file.exists()]
        found = root_cause(collect_failures(self._logs, self._terminal), killed=bool(silent))
        if found is not None:
            statuses = [status for status in self._statuses if status.rank == found[0]]
            return self._fault("failed", statuses, f"failed{_where(statuses[0])}: {found[1].message}")
        over = [status for status in self._statuses if now - status.since >= self._limit(status) - _SLACK_S]
        if over:
            limit = f"resilience.timeouts_s.{over[0].section or 'out_of_section'} = {self._limit(over[0]):g}"
            return self._fault("hung", over, f"hung{_where(over[0])} ({limit}; stacks in {self._dir})")
        return self._fault("died", silent or lost, f"died{_where((silent or lost)[0])}")

    def _fault(self, kind: Literal["died", "failed", "hung"], statuses: Sequence[RankStatus], text: str) -> Fault:
        ranks = tuple(sorted(status.rank for status in statuses))
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return Fault(kind, ranks, statuses[0].section, f"{who} {text}", time.time())

    def _limit(self, status: RankStatus) -> float:
        return self._limits.get(status.section or "out_of_section", math.inf)

    def _say(self, fault: Fault, recovered_s: float | None) -> None:
        end = "failed again before recovery" if recovered_s is None else f"recovered in {recovered_s:.1f} s"
        what = fault.text.partition("\n")[0]
        self._terminal.say(f"restart {self._attempt} of {self._allowed}: {what}; {end}")
        row = {"restart": self._attempt, **asdict(fault), "recovered_s": recovered_s}
        with contextlib.suppress(OSError), self._record.open("a") as file:  # a full disk: the terminal has it
            file.write(json.dumps(row) + "\n")


def _where(status: RankStatus) -> str:
    return f" in {status.section}" if status.section else " between two sections"


def _is_alive(pid: int) -> bool:
    """True for a living process; a zombie counts as dead."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
