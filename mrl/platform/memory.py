"""Peak memory of this process (GPU memory with CUDA, else resident set) and torch's GPU cache."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

CLEAR_REFS = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


def reset_peak_memory() -> bool:
    """Starts a new peak; returns False if that is impossible.

    On a CPU it needs Linux; elsewhere the peak is that of the process's whole life.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def peak_memory_bytes() -> int:
    """Returns the peak in bytes since the last `reset_peak_memory`."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def release_cached_memory() -> None:
    """Releases torch's unused GPU cache to other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
