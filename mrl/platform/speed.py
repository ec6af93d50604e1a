"""Speed of this rank's processor and device, for comparison with other ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from mrl.platform.process import device, synchronize

_REPEATS = 5


class PassTimer:
    """Timer that Megatron's schedules start and stop around a pass.

    It measures between two events of the device's stream and never waits; only finished passes count.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began: Any = None
        self._unfinished: deque[tuple[Any, Any]] = deque()

    def start(self, barrier: bool = False) -> None:
        self._began = _event()

    def stop(self, barrier: bool = False) -> None:
        self._unfinished.append((self._began, _event()))
        self.seconds()  # drains finished passes if nobody else does

    def seconds(self) -> float:
        """Returns the seconds of all finished passes; a running pass counts in a later call."""
        while self._unfinished and self._unfinished[0][1].query():
            began, ended = self._unfinished.popleft()
            self._seconds += began.elapsed_time(ended) / 1e3
        return self._seconds


class _Untimed:
    def start(self, barrier: bool = False) -> None: ...
    def stop(self, barrier: bool = False) -> None: ...


_PASSES = {"forward-compute": PassTimer(), "backward-compute": PassTimer()}
_UNTIMED = _Untimed()


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _timer(name: str, log_level: int = 0) -> PassTimer | _Untimed:
    return _PASSES.get(name, _UNTIMED)


def pass_timers() -> Callable[..., Any] | None:
    """Returns Megatron's `timers` that measure passes on a GPU; None on a CPU, where processor time is enough."""
    return _timer if device().type == "cuda" else None


def busy_seconds() -> float:
    """Returns the seconds of work so far, without most of the waiting for other ranks.

    On a CPU it is this process's processor time. On a GPU it is the time of finished forward and backward passes: the
    host spins while it waits, and collectives inside a pass (tensor, context and expert parallelism) make the ranks of
    a group equally slow.
    """
    if device().type == "cuda":
        return sum(timer.seconds() for timer in _PASSES.values())
    return time.process_time()


def probe_seconds() -> float:
    """Returns the best time of a few tries for a fixed matrix product on this process's device, each at most 2 ms."""
    where = device()
    size = 2048 if where.type == "cuda" else 192
    a = torch.ones(size, size, device=where)
    best = float("inf")
    for _ in range(_REPEATS):
        synchronize()
        began = time.perf_counter()
        torch.mm(a, a)
        synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def cpu_gflops(dtype: torch.dtype, size: int = 512, tries: int = 5) -> float:
    """Returns the best GFLOP/s of a few square matrix products on this CPU, with torch's number of threads."""
    left, right = (torch.rand(size, size).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds) / 1e9
