"""Memory that a CPU rank gives back and will want again stays with its process.

glibc takes large blocks from the system and gives them back at once. A training step wants the same blocks each time,
and the system hands them out page by page, filled with zeros.
"""

from __future__ import annotations

import ctypes

import torch

from mrl.platform.registry import Stage, adaptation

KEPT_BYTES = 1 << 30  # blocks up to this size come from the heap, which keeps so much free at its end
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def gives_back() -> bool:
    """Whether a CPU rank would return large blocks at once."""
    return not torch.cuda.is_available() and hasattr(ctypes.CDLL(None), "mallopt")


@adaptation(
    "kept_memory",
    why="glibc returns every large block to the system, and new pages cost a tenth of a small model's step",
    stage=Stage.BEFORE_IMPORT,
    needed=gives_back,
)
def keep_memory() -> None:
    libc = ctypes.CDLL(None)
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        libc.mallopt(option, KEPT_BYTES)
