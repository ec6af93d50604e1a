"""Preemption: SIGTERM or SIGUSR1 asks the run to save and leave before the scheduler kills it.

A signal may reach one rank alone, and no rank can leave a step alone. So the handler only records it, and all ranks
compare at the end of a step. SIGINT ends a rank at once, as do the two others while nothing can be saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mrl.resilience.protocol import EXIT_PREEMPTED, MARKER, mark_preempted, started_by_torchelastic
from mrl.stopping import Stopped

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)

_due: float | None = None  # time.monotonic() by which the rank must have left
_run_dir: Path | None = None  # set once the run has begun


def exit_as_resumable() -> None:
    """Lets SIGTERM and SIGUSR1 end `mrl train` before a run has begun, with the exit code of a resumable run.

    This works in the midst of an import too. Ignored signals stay ignored.
    """
    for number in WARNINGS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, exit_before_run)


def exit_before_run(number: int, frame: FrameType | None) -> NoReturn:
    name = signal.Signals(number).name
    text = (
        f"mrl: stopped by {name} before the run started (exit code {EXIT_PREEMPTED}): run the same command to start it"
    )
    os.write(2, f"{text}\n".encode())
    os._exit(EXIT_PREEMPTED)


def restore_default_signals() -> None:
    """Lets stopping signals end the process silently while nothing is open, in the midst of an import too."""
    for number in (signal.SIGINT, *WARNINGS):
        signal.signal(number, signal.SIG_DFL)


def close_on_signal() -> None:
    """Turns a deadly stopping signal into SystemExit, so that everything open is closed; a second signal is ignored."""
    for number in (signal.SIGINT, *WARNINGS):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def save_on_signal(deadline_s: float) -> None:
    """Lets SIGTERM and SIGUSR1 only be recorded; the rank leaves without saving `deadline_s` seconds later."""

    def warn(number: int, frame: FrameType | None) -> None:
        global _due
        if _due is None:
            _due = time.monotonic() + deadline_s
            signal.setitimer(signal.ITIMER_REAL, deadline_s)

    signal.signal(signal.SIGALRM, _too_late)
    for number in WARNINGS:
        signal.signal(number, warn)


def is_requested() -> bool:
    return _due is not None


def seconds_left(deadline_s: float) -> float:
    """Returns the seconds left for saving, less a reserve for leaving; `deadline_s` counts if only other ranks were
    warned."""
    return 0.9 * (deadline_s if _due is None else max(0.0, _due - time.monotonic()))


def begin(run_dir: Path) -> None:
    """Begins or resumes the run and removes the marker that `leave` wrote."""
    global _run_dir
    _run_dir = run_dir
    (run_dir / MARKER).unlink(missing_ok=True)


def leave(run_dir: Path, step: int) -> NoReturn:
    """Ends this rank after its state is saved, and marks the run as one to resume. step: last saved, 0 without one.

    Raises SystemExit, with code 0 under torchrun and ft_launcher, which take every other code for a failure.
    """
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    _mark_preempted(run_dir, step or None)
    raise SystemExit(_code())


def _mark_preempted(run_dir: Path, step: int | None) -> None:
    """Writes the marker for the launcher, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        mark_preempted(run_dir, step)


def _code() -> int:
    return 0 if started_by_torchelastic() else EXIT_PREEMPTED


def _too_late(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):  # a full disk; no print, since the handler may interrupt one
        os.write(1, b"the step did not end, or was not saved, within resilience.save_deadline_s: stopping without it\n")
    code = EXIT_PREEMPTED  # without a marker, a launcher needs a nonzero code
    if _run_dir is not None:
        with contextlib.suppress(OSError):
            _mark_preempted(_run_dir, None)
            code = _code()
    raise Stopped(code)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    for stopping in (signal.SIGINT, *WARNINGS):
        signal.signal(stopping, signal.SIG_IGN)
    raise Stopped(128 + number)
