"""Health check of this machine's GPUs: whether they compute, and whether their memory is free.

A separate process checks them and prints a line a GPU, since a faulty GPU can hang its user and CUDA contexts take
memory.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch

TIMEOUT_S = 60.0
SIZE = 1024
BUSY_SHARE = 0.1  # share of memory held by other processes


@dataclass(frozen=True)
class GpuHealth:
    """Health of one GPU. problem: why it should not be used, "" if healthy. free, total: bytes; capability: CUDA
    compute capability"""

    index: int
    name: str
    free: int
    total: int
    capability: tuple[int, int]
    problem: str = ""


class GpuTimeout(RuntimeError):
    """The GPUs did not answer in time."""


@functools.cache
def gpu_health(timeout_s: float = TIMEOUT_S) -> list[GpuHealth]:
    """Returns the health of every GPU that this process may use, as of the first call; empty without CUDA.

    Raises GpuTimeout or OSError.
    """
    if not torch.cuda.is_available():
        return []
    command = [sys.executable, "-c", "from mrl.platform.gpu_health import main; main()"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise GpuTimeout(f"a small matrix product on every GPU took longer than {timeout_s:g} s") from None
    if done.returncode:
        raise OSError(f"a small matrix product on every GPU failed: {done.stderr.strip().splitlines()[-1:]}")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [GpuHealth(**gpu | {"capability": tuple(gpu["capability"])}) for gpu in found]


def assess(index: int, name: str, free: int, total: int, capability: tuple[int, int], product: float) -> GpuHealth:
    """Returns the verdict on one GPU. product: an entry of ones [SIZE, SIZE] @ ones"""
    problem = ""
    if product != SIZE:
        problem = f"computes incorrectly: a matrix product of ones gave {product:g} instead of {SIZE}"
    elif total - free > BUSY_SHARE * total:
        problem = f"other processes use {(total - free) / 1e9:.1f} of its {total / 1e9:.1f} GB"
    return GpuHealth(index, name, free, total, capability, problem)


def _examine(index: int) -> GpuHealth:
    free, total = torch.cuda.mem_get_info(index)
    ones = torch.ones(SIZE, SIZE, device=torch.device("cuda", index), dtype=torch.bfloat16)
    product = (ones @ ones).float()
    least, most = product.min().item(), product.max().item()
    kind, name = torch.cuda.get_device_capability(index), torch.cuda.get_device_name(index)
    return assess(index, name, free, total, kind, least if least != SIZE else most)


def main() -> None:
    for number in range(torch.cuda.device_count()):
        print(json.dumps(asdict(_examine(number))))
