"""Simulates one rank of a world that does not exist, to inspect what it would build."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mrl.platform import process


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int, device: str = "meta") -> Iterator[None]:
    """Makes this process that rank under torch's fake process group; models are built on `device`.

    On "meta" tensors have shapes and no memory. Shapes are right after every collective, values are not: an all-gather
    copies this rank's part to all places. Raises RuntimeError inside a real world.
    """
    if dist.is_initialized():
        raise RuntimeError("this process already has a process group: a simulated rank would replace it")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group, current_device = dist.new_group, torch.cuda.current_device

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        """Replaces gloo, which Megatron requests by name for checkpoints."""
        return new_group(*args, **kwargs | {"backend": None})

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    dist.new_group = fake_group
    process._fake_device = torch.device(device)
    torch.cuda.current_device = lambda: process.device()  # type: ignore[assignment,return-value]
    try:
        yield
    finally:
        dist.new_group, torch.cuda.current_device = new_group, current_device
        process._fake_device = None
        dist.destroy_process_group()
