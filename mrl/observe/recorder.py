"""Recorder of a run's events: phases, finished samples, step metrics, notes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType

from mrl.core import StepStats
from mrl.files import write_atomically
from mrl.observe.files import DATA_NOTES, METRICS, write_guarded
from mrl.observe.metrics import MetricsFile
from mrl.observe.progress import Display, LiveDisplay, PlainDisplay, Progress
from mrl.observe.remote_tracker import Outcome, TrackerQueue
from mrl.observe.trackers import Tracker
from mrl.redaction import redact

DATA_KEYS = ("data.train", "data.validation", "ptx.data")
NO_TRACKERS: Mapping[str, Tracker | TrackerQueue] = MappingProxyType({})


class SilentRecorder:
    """Recorder of ranks that report nothing: times phases and prints nothing."""

    @contextmanager
    def phase(self, name: str, stats: StepStats | None = None) -> Iterator[None]:
        """Adds the seconds of a phase to `stats.seconds[name]`, even if it fails."""
        began = time.monotonic()
        try:
            yield
        finally:
            if stats is not None:
                stats.seconds[name] = stats.seconds.get(name, 0.0) + time.monotonic() - began

    def expect(self, total: int) -> None:
        pass

    def advance(self, count: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def log(self, stats: StepStats) -> None:
        pass

    def tracker_runs(self) -> dict[str, str]:
        """Run ids by tracker, for a checkpoint."""
        return {}

    def resume_runs(self, tracker_runs: Mapping[str, str]) -> None:
        """Resumes the trackers' runs. tracker_runs: as `tracker_runs` returned them for the checkpoint"""

    def write_guarded(self, what: str, write: Callable[[], object]) -> None:
        write()


class Recorder(SilentRecorder):
    """Recorder of rank 0: metrics.jsonl, trackers by name, and a display. Use as a context manager or call `close()`.

    Only the loop's thread may use it: engines report their samples in the thread that requested them.

    live: redraw a panel (True), print a line a step (False), or decide by whether stdout is a terminal (None).
    on_error: as checkpoint.on_error, "stop" or "warn"
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        trackers: Mapping[str, Tracker | TrackerQueue] = NO_TRACKERS,
        live: bool | None = None,
        on_error: str = "stop",
    ) -> None:
        self._on_error = on_error
        self._file = MetricsFile(run_dir / METRICS)
        self._of_data, self._about_data = run_dir / DATA_NOTES, list[str]()
        self._progress = Progress(total_steps)
        self._phases: list[str] = []
        self._closed = False
        self._trackers = dict(trackers)
        show_live = sys.stdout.isatty() if live is None else live
        self._display: Display = LiveDisplay(self._progress) if show_live else PlainDisplay(self._progress)

    @contextmanager
    def phase(self, name: str, stats: StepStats | None = None) -> Iterator[None]:
        """Times a phase into `stats.seconds[name]` and shows it while it lasts."""
        self._phases.append(name)
        self._progress.enter(name)
        try:
            with super().phase(name, stats):
                yield
        finally:
            self._phases.pop()
            self._progress.enter(self._phases[-1] if self._phases else "between phases")

    def expect(self, total: int) -> None:
        """Announces `total` calls of `advance` in the current phase."""
        self._progress.finished, self._progress.expected = 0, total

    def advance(self, count: int = 1) -> None:
        """Counts `count` more of the expected items as finished."""
        self._progress.finished += count
        self._display.tick()

    def note(self, text: str) -> None:
        """Shows one line to the user. A line that begins with a key of the data is kept for the model card."""
        self._display.note(redact(text))
        if text.startswith(DATA_KEYS):
            self._about_data.append(redact(text))
            content = json.dumps(self._about_data, indent=1)
            self.write_guarded("the list of left-out rows", lambda: write_atomically(self._of_data, f"{content}\n"))

    def log(self, stats: StepStats) -> None:
        """Ends a step: writes and shows its metrics, and names the non-finite ones."""
        bad: list[str] = []
        self.write_guarded("the step's metrics", lambda: bad.extend(self._file.write(stats)))
        for name, tracker in self._trackers.items():
            self.write_guarded(f"the step's metrics in {name}", partial(tracker.write, stats))
        self._progress.step_done(stats)
        self._pass_on_notes()
        self._display.step_done()
        if bad:
            self.note(f"step {stats.step}: not finite, written as null to metrics.jsonl: {', '.join(bad)}")

    def tracker_runs(self) -> dict[str, str]:
        return {name: sender.run_id for name, sender in self._senders() if sender.run_id is not None}

    def resume_runs(self, tracker_runs: Mapping[str, str]) -> None:
        for name, sender in self._senders():
            if name in tracker_runs:
                sender.resume_run(tracker_runs[name])

    def write_guarded(self, what: str, write: Callable[[], object]) -> None:
        """Calls `write`; checkpoint.on_error decides what its failure means. Raises WriteFailed."""
        write_guarded(what, write, self._on_error, self.note)

    def close(self, outcome: Outcome = "finished") -> None:
        if self._closed:
            return
        self._closed = True
        for tracker in self._trackers.values():
            tracker.close(outcome)
        self._pass_on_notes()
        self._display.close()

    def _senders(self) -> list[tuple[str, TrackerQueue]]:
        return [(name, tracker) for name, tracker in self._trackers.items() if isinstance(tracker, TrackerQueue)]

    def _pass_on_notes(self) -> None:
        for _, sender in self._senders():
            for note in sender.notes():
                self.note(note)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.close("stopped" if issubclass(kind, SystemExit | KeyboardInterrupt) else "failed")
