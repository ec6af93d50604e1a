"""This process' device, its communication backend and its place in the world."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist


def device() -> torch.device:
    """The GPU with this process' LOCAL_RANK where CUDA is there, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def backend() -> Literal["gloo", "nccl"]:
    return "nccl" if torch.cuda.is_available() else "gloo"


def init_process_group(timeout_s: float) -> None:
    """Join the world that torchrun describes in the environment; a collective that waits longer than this fails.

    On a GPU the process is bound to its device first. A world of one needs no environment. Does nothing if there
    already is a process group.
    """
    if dist.is_initialized():
        return
    limit = timedelta(seconds=timeout_s)
    bound = device() if torch.cuda.is_available() else None
    if bound is not None:
        torch.cuda.set_device(bound)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend(), timeout=limit, device_id=bound)
    else:
        dist.init_process_group(backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=limit, device_id=bound)


def synchronize() -> None:
    """Wait until this process' device has done all its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_uuid(index: int) -> str:
    """The GPU's own name, the same in every process whatever devices it may see."""
    return str(torch.cuda.get_device_properties(index).uuid)


def gpu_count() -> int:
    """GPUs that this process may use, 0 on a CPU machine. Starts nothing on them."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
