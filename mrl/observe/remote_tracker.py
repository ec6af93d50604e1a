"""Sends metrics to a tracker that may be slow or down; training never waits for it, and no metrics are lost.

Unsent metrics remain in metrics.jsonl. A run that resumes, in this process or a later one, sends what the tracker
lacks under the same run id.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from mrl.config.problems import printable, shortened
from mrl.config.schema import AnyConfig
from mrl.core import StepStats
from mrl.files import write_atomically
from mrl.observe.files import UnreadableFile
from mrl.observe.metrics import Row, flatten, read_metrics

FIRST_RETRY_S, LAST_RETRY_S = 5.0, 120.0
CLOSE_S = 30.0  # to send the rest of the queue when the run ends
FOLDER = "trackers"  # in the run directory
Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class TrackedStep:
    """One row of metrics.jsonl. unix_time: when the step ended"""

    step: int
    unix_time: float
    metrics: Row


class RemoteTracker(ABC):
    """Interface of an external tracker.

    All methods but the constructor run in one thread, which is not the main one. Any exception means that the tracker
    is currently down.
    """

    package: ClassVar[str]  # must be installed; only the tracker's own methods import it

    def __init__(self, cfg: AnyConfig, run_dir: Path) -> None:
        """Contacts no server."""
        self._cfg, self._run_dir = cfg, run_dir
        self._run: Any = None  # the library's own object or id, once it is open

    @abstractmethod
    def open(self, run_id: str | None) -> str:
        """Resumes the given run, or begins one; returns its id."""

    @abstractmethod
    def where(self) -> str:
        """Address or folder of the open run, for a reader."""

    @abstractmethod
    def send(self, rows: Sequence[TrackedStep]) -> None:
        """Sends steps in order; a step may be sent again with new values."""

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Ends the open run with its outcome."""


class TrackerQueue:
    """Queue of a `RemoteTracker`. The loop's thread calls it; `notes` come from the sending thread and are for the
    user."""

    def __init__(self, name: str, remote: RemoteTracker, run_dir: Path, retry_s: float = FIRST_RETRY_S) -> None:
        self.name, self._remote, self._run_dir, self._retry_s = name, remote, run_dir, retry_s
        self._file = run_dir / FOLDER / f"{name}.json"
        self.run_id, self._sent = _read(self._file)
        self._changed = threading.Condition()
        self._waiting: list[TrackedStep] = []
        self._notes: list[str] = []
        self._outcome: Outcome | None = None
        self._thread: threading.Thread | None = None

    def write(self, stats: StepStats) -> None:
        """Queues a step and returns at once. The first step of this process also queues earlier steps that the tracker
        lacks."""
        first = self._thread is None
        rows = self._missed(stats.step) if first else []
        with self._changed:
            self._waiting += [*rows, TrackedStep(stats.step, time.time(), flatten(stats))]
            self._changed.notify()
        if first:
            self._thread = threading.Thread(target=self._serve, daemon=True, name=f"tracker-{self.name}")
            self._thread.start()

    def resume_run(self, run_id: str) -> None:
        """Resumes the checkpoint's run, unless the run directory knows a newer id. Called before the first step."""
        self.run_id = self.run_id or run_id

    def notes(self) -> list[str]:
        """Returns the messages since the last call."""
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def close(self, outcome: Outcome) -> None:
        """Waits up to CLOSE_S for the queue to empty; a note then names what the tracker lacks."""
        if self._thread is None:
            return
        with self._changed:
            self._outcome = outcome
            self._changed.notify()
        self._thread.join(CLOSE_S)
        with self._changed:
            if self._waiting:
                self._notes.append(
                    f"{self.name} did not receive the metrics of {_steps(self._waiting)}: they are in "
                    f"{self._run_dir / 'metrics.jsonl'}, and are sent when the run is resumed"
                )
            elif self._thread.is_alive():
                self._notes.append(f"{self.name} did not confirm within {CLOSE_S:g} s that it has stored all metrics")

    def _missed(self, step: int) -> list[TrackedStep]:
        self._sent = min(self._sent, step - 1)  # later steps run again
        with suppress(UnreadableFile, OSError):
            rows = [row for row in read_metrics(self._run_dir) if self._sent < row["step"] < step]
            return [TrackedStep(int(row.pop("step")), row.pop("unix_time", 0.0), row) for row in rows]
        return []

    def _serve(self) -> None:
        """Sends until the run has ended and the queue is empty, or a last try failed."""
        is_open, failures = False, 0
        while True:
            rows, outcome = self._await_work(failures)
            try:
                if not is_open:
                    self.run_id, is_open = self._remote.open(self.run_id), True
                    self._note(f"{self.name}: {self._remote.where()}")
                    self._write()
                if rows:
                    self._remote.send(rows)
                    self._has(rows, failures)
                failures = 0
                if outcome is not None and not self._waiting:
                    self._remote.close(outcome)
                    return
            except Exception as error:  # a tracker's library may raise anything
                self._failed(error, failures)
                failures += 1
                if outcome is not None:
                    return

    def _await_work(self, failures: int) -> tuple[list[TrackedStep], Outcome | None]:
        """Waits for steps to send, or for the outcome; after failures it backs off exponentially."""
        patience = min(LAST_RETRY_S, self._retry_s * 2 ** (failures - 1)) if failures else None
        with self._changed:
            self._changed.wait_for(lambda: self._outcome is not None or (self._waiting and not failures), patience)
            return list(self._waiting), self._outcome

    def _has(self, rows: list[TrackedStep], failures: int) -> None:
        with self._changed:
            del self._waiting[: len(rows)]
        self._sent = rows[-1].step
        self._write()
        if failures:
            self._note(f"{self.name} responds again and has received {_steps(rows)}")

    def _failed(self, error: Exception, failures: int) -> None:
        if not failures:
            what = printable(shortened(" ".join(f"{type(error).__name__}: {error}".split()), most=300))
            self._note(
                f"{self.name} accepts no metrics at the moment ({what}); training continues, metrics.jsonl keeps them, "
                "and they are sent when it responds"
            )

    def _note(self, text: str) -> None:
        with self._changed:
            self._notes.append(text)

    def _write(self) -> None:
        with suppress(OSError):  # a full disk: the checkpoint has the id, and a step may be sent twice
            self._file.parent.mkdir(exist_ok=True)
            write_atomically(self._file, json.dumps({"run_id": self.run_id, "sent_to_step": self._sent}) + "\n")


def _read(file: Path) -> tuple[str | None, int]:
    """Returns (the tracker's run id, its last sent step); (None, -1) for a new run."""
    try:
        content = json.loads(file.read_text())
        return str(content["run_id"]), int(content["sent_to_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, -1


def _steps(rows: Sequence[TrackedStep]) -> str:
    first, last = rows[0].step, rows[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"
