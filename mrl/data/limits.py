"""Limits on the time and memory of foreign code that runs in this process."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn


@contextmanager
def resource_limits(seconds: float, nbytes: int) -> Iterator[None]:
    """Raises TimeoutError in a body that exceeds `seconds` of processor time, MemoryError in one that allocates more
    than `nbytes`. Works in the main thread only: other threads have no limits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _end)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_space() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Returns the size of the address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError
