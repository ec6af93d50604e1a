"""NVIDIA's tools on a rank with a GPU: NVTX ranges, the part of a run that nsys captures, the allocator's history."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


def nvtx_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Returns the context of a named range in the profile of nsys; one that does nothing without CUDA."""
    return torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()


@contextlib.contextmanager
def nsys_capture() -> Iterator[None]:
    """Context that nsys captures with `--capture-range=cudaProfilerApi`; nothing happens without CUDA."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()


def record_memory_history(max_entries: int, on_out_of_memory: Callable[[], None] | None) -> None:
    """Starts to record allocations, with their stacks, in this process.

    max_entries: newest events that are kept. on_out_of_memory: called where an allocation fails, before the error
    """
    torch.cuda.memory._record_memory_history(max_entries=max_entries)
    if on_out_of_memory is not None:
        torch._C._cuda_attach_out_of_memory_observer(lambda *sizes: on_out_of_memory())  # type: ignore[attr-defined]


def dump_memory_snapshot(file: Path) -> None:
    """Writes what is allocated, and the recorded history, for https://pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(file))
