"""How fast this rank's processor and device are, for comparison with other ranks."""

from __future__ import annotations

import time

import torch

from mrl.platform.process import device, synchronize

_REPEATS = 5


def busy_seconds() -> float:
    """Processor time of this process so far: on a CPU, waiting for other ranks is no part of it."""
    return time.process_time()


def probe_seconds() -> float:
    """Seconds for a fixed piece of matrix work on this process' device, the best of a few tries: 2 ms or less each."""
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
