"""Seconds on a device, and its limits in the same process: matrix products and copies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from tools.gpu.stage import Setting

DTYPE = torch.bfloat16
ROUNDS = 5


def seconds(work: Callable[[], Any], rounds: int) -> float:
    """Of the fastest of some rounds, after one that is not counted."""
    best = math.inf
    for number in range(rounds + 1):
        platform.synchronize()
        began = time.perf_counter()
        work()
        platform.synchronize()
        if number:
            best = min(best, time.perf_counter() - began)
    return best


def device_us(work: Callable[[], Any]) -> float | str:
    """Microseconds of the kernels and copies of one call, as torch's profiler has them: what is left of `seconds` where
    the host is ahead, as it is in a step. A word where the profiler has none. On a CPU the time in operations."""
    on_gpu = platform.device().type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    work()
    platform.synchronize()
    with torch.profiler.profile(activities=[activity]) as profiler:
        work()
        platform.synchronize()
    found = profiler.key_averages()
    spent = sum(event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in found)
    return spent or "the profiler saw none"


def rounds_of(setting: Setting) -> int:
    return 1 if setting.rehearsal else ROUNDS


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=platform.device()).mul_(scale).to(DTYPE)


@cache
def gemm_flops(size: int, rounds: int) -> float:
    """A second, of a square product in bfloat16."""
    a, b = random(size, size), random(size, size)
    return 2.0 * size**3 / seconds(lambda: a @ b, rounds)


@cache
def copied(nbytes: int, rounds: int) -> float:
    """Bytes a second that are copied on the device; as many are read as written."""
    a, b = (torch.zeros(nbytes, dtype=torch.uint8, device=platform.device()) for _ in range(2))
    return nbytes / seconds(lambda: b.copy_(a), rounds)


def product_flops(setting: Setting) -> float:
    return gemm_flops(128 if setting.rehearsal else 8192, rounds_of(setting))


def copied_bytes(setting: Setting) -> float:
    return copied(1 << 20 if setting.rehearsal else 1 << 30, rounds_of(setting))
