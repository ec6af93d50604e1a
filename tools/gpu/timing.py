"""Timing of work on a device, and the device's limits measured in the same process: matrix products and copies."""

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
    """Returns the seconds of the fastest of `rounds` calls, after one warm-up call."""
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
    """Returns the microseconds of the kernels and copies of one call, by torch's profiler; on a CPU, of its operations.

    This is the time of a call within a step, where the host runs ahead of the device. Returns a message if the profiler
    records nothing.
    """
    on_gpu = platform.device().type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    work()
    platform.synchronize()
    with torch.profiler.profile(activities=[activity]) as profiler:
        work()
        platform.synchronize()
    events = profiler.key_averages()
    spent = sum(event.self_device_time_total if on_gpu else event.self_cpu_time_total for event in events)
    return spent or "the profiler recorded nothing"


def rounds_of(setting: Setting) -> int:
    return 1 if setting.rehearsal else ROUNDS


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=platform.device()).mul_(scale).to(DTYPE)


@cache
def gemm_rate(size: int, rounds: int) -> float:
    """Returns the FLOP/s of a square matrix product in bfloat16."""
    a, b = random(size, size), random(size, size)
    return 2.0 * size**3 / seconds(lambda: a @ b, rounds)


@cache
def copy_rate(nbytes: int, rounds: int) -> float:
    """Returns the bytes copy_rate per second on the device; each is read once and written once."""
    a, b = (torch.zeros(nbytes, dtype=torch.uint8, device=platform.device()) for _ in range(2))
    return nbytes / seconds(lambda: b.copy_(a), rounds)


def gemm_flops_per_s(setting: Setting) -> float:
    return gemm_rate(128 if setting.rehearsal else 8192, rounds_of(setting))


def copied_bytes_per_s(setting: Setting) -> float:
    return copy_rate(1 << 20 if setting.rehearsal else 1 << 30, rounds_of(setting))
