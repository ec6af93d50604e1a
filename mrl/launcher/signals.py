"""The signals that stop a run, and how a process is tied to the life of this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence

from mrl.resilience import preemption

AT_ONCE = (signal.SIGINT, signal.SIGHUP)
WARNINGS = (signal.SIGTERM, signal.SIGUSR1)  # a scheduler's: ranks that can save do that first


_interrupts: list[int] = []  # since `note_interrupts`


def note_interrupts() -> None:
    """From now on Ctrl-C is not lost where imported code swallows the KeyboardInterrupt: see `raise_swallowed`."""

    def raised(number: int, frame: object) -> None:
        _interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, raised)


def raise_swallowed() -> None:
    """Raises KeyboardInterrupt if there was one and this process has gone on."""
    if _interrupts:
        _interrupts.clear()
        raise KeyboardInterrupt


@contextlib.contextmanager
def collected() -> Iterator[list[int]]:
    """Collects the stopping signals in a list instead of dying of them. Ignored ones (nohup) stay ignored. After that
    the run is over, and no more one that has not begun."""
    received: list[int] = []
    wanted = [number for number in (*AT_ONCE, *WARNINGS) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda got, _: received.append(got)) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is preemption.not_begun else handler)


def warning(received: Sequence[int], can_save: bool) -> signal.Signals | None:
    """The signal by which ranks are to save and leave, unless they are to end at once."""
    if not received or not can_save or any(number in AT_ONCE for number in received):
        return None
    return signal.Signals(received[0])


def as_child(ignored: Collection[signal.Signals] = ()) -> Callable[[], None]:
    """What a child calls before it becomes another program: SIGINT works there even if it is ignored here, `ignored`
    ones do not, and the kernel is to kill it when its parent dies, however that dies (Linux)."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    parent, set_death_signal = os.getpid(), 1

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        if libc is not None:
            libc.prctl(set_death_signal, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return prepare
