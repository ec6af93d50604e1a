"""Signals that stop a run, and programs that die with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import IO

from mrl.forks import die_with_parent
from mrl.resilience import preemption

AT_ONCE = (signal.SIGINT, signal.SIGHUP)
_interrupts: list[int] = []  # since `record_interrupts`


def record_interrupts() -> None:
    """Records Ctrl-C, so that `raise_recorded_interrupt` can raise a KeyboardInterrupt that imported code swallowed."""

    def raised(number: int, frame: object) -> None:
        _interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, raised)


def raise_recorded_interrupt() -> None:
    """Raises KeyboardInterrupt if one occurred and this process went on."""
    if _interrupts:
        _interrupts.clear()
        raise KeyboardInterrupt


@contextlib.contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Collects stopping signals in a list instead of ending on them. Ignored signals (nohup) stay ignored.

    Restores the previous handlers after the block, except `preemption.exit_before_run`, since the run has begun.
    """
    received: list[int] = []
    wanted = [number for number in (*AT_ONCE, *preemption.WARNINGS) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda got, _: received.append(got)) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is preemption.exit_before_run else handler)


def start_program(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    ignored: Collection[signal.Signals] = (),
) -> subprocess.Popen[bytes]:
    """Starts a program without stdin that leads a session and dies with this process (Linux).

    ignored: signals that it ignores
    """
    parent = os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=prepare,
    )
