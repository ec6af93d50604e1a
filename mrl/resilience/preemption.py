"""A scheduler's warning: SIGTERM or SIGUSR1 asks the run to save and leave before it is killed.

A signal may reach one rank alone, and none can leave a step alone: the handler only remembers it, and all ranks ask
each other at the end of a step. SIGINT ends a rank at once, and so do the two others while nothing could be saved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mrl.resilience.protocol import EXIT_PREEMPTED, MARKER, note_leaving, started_by_torchelastic
from mrl.stopping import Stopped

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)

_due: float | None = None  # time.monotonic() by which the rank must have left
_run_dir: Path | None = None  # once the run goes on in it


def begin_later() -> None:
    """While `mrl train` has begun nothing: SIGTERM and SIGUSR1 end it as they end a run that goes on when it is started
    again, in the midst of an import too. Ignored ones stay ignored."""
    for number in WARNINGS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, not_begun)


def not_begun(number: int, frame: FrameType | None) -> NoReturn:
    name = signal.Signals(number).name
    text = (
        f"mrl: told to stop by {name} before the run had begun (exit code {EXIT_PREEMPTED}): the same command starts it"
    )
    os.write(2, f"{text}\n".encode())
    os._exit(EXIT_PREEMPTED)


def die_at_once() -> None:
    """While nothing is open yet: a stopping signal ends the process without a word, in the midst of an import too."""
    for number in (signal.SIGINT, *WARNINGS):
        signal.signal(number, signal.SIG_DFL)


def close_first() -> None:
    """A stopping signal that would kill becomes SystemExit, so that all that is open gets closed; a second one is
    ignored."""
    for number in (signal.SIGINT, *WARNINGS):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def save_first(deadline_s: float) -> None:
    """SIGTERM and SIGUSR1 only leave word from now on; after `deadline_s` more seconds the rank leaves as it is."""

    def warn(number: int, frame: FrameType | None) -> None:
        global _due
        if _due is None:
            _due = time.monotonic() + deadline_s
            signal.setitimer(signal.ITIMER_REAL, deadline_s)

    signal.signal(signal.SIGALRM, _too_late)
    for number in WARNINGS:
        signal.signal(number, warn)


def is_warned() -> bool:
    return _due is not None


def left_s(deadline_s: float) -> float:
    """Seconds for saving, with some to spare for leaving; of all of `deadline_s` if only others were warned."""
    return 0.9 * (deadline_s if _due is None else max(0.0, _due - time.monotonic()))


def begin(run_dir: Path) -> None:
    """The run goes on: what `leave` wrote down holds no longer."""
    global _run_dir
    _run_dir = run_dir
    (run_dir / MARKER).unlink(missing_ok=True)


def leave(run_dir: Path, step: int) -> NoReturn:
    """Ends this rank after its state has been saved; that the run is to be continued is written down. step: the last
    that is saved, 0 if none is.

    Raises SystemExit. torchrun and ft_launcher take every exit code but 0 for a failure: under them it is 0.
    """
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    _note_leaving(run_dir, step or None)
    raise SystemExit(_code())


def _note_leaving(run_dir: Path, step: int | None) -> None:
    """On rank 0: the launcher finds it."""
    if os.environ.get("RANK", "0") == "0":
        note_leaving(run_dir, step)


def _code() -> int:
    return 0 if started_by_torchelastic() else EXIT_PREEMPTED


def _too_late(number: int, frame: FrameType | None) -> NoReturn:
    with contextlib.suppress(OSError):  # of a full disk; and no print, in whose midst this may be
        os.write(1, b"the step was not over, or not saved, within resilience.save_deadline_s: leaving without it\n")
    code = EXIT_PREEMPTED  # a launcher that finds no word of it needs one that is not 0
    if _run_dir is not None:
        with contextlib.suppress(OSError):
            _note_leaving(_run_dir, None)
            code = _code()
    raise Stopped(code)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    for stopping in (signal.SIGINT, *WARNINGS):
        signal.signal(stopping, signal.SIG_IGN)
    raise Stopped(128 + number)
