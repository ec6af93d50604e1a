"""Keeps freed memory of a CPU rank in its process for reuse.

glibc takes large blocks from the system and returns them at once. A training step needs the same blocks each time, and
the system hands them out page by page, filled with zeros. The heap uses huge pages, since a pass over a large tensor
otherwise needs 512 times as many page look-ups.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from mrl.platform.registry import Stage, adaptation

KEPT_BYTES = 1 << 30  # blocks up to this size come from the heap, which keeps as much free at its end
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_HUGE_BYTES = KEPT_BYTES * 7 // 8  # below the size at which freeing it would return it


def returns_large_blocks() -> bool:
    """True if a CPU rank would return large blocks at once."""
    return not torch.cuda.is_available() and hasattr(ctypes.CDLL(None), "mallopt")


@adaptation(
    "kept_memory",
    why="glibc returns every large block to the system, and new pages cost a tenth of a small model's step",
    stage=Stage.BEFORE_IMPORT,
    needed=returns_large_blocks,
)
def keep_memory() -> None:
    libc = ctypes.CDLL(None)
    for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        libc.mallopt(option, KEPT_BYTES)
    _in_huge_pages(libc)


def _in_huge_pages(libc: ctypes.CDLL) -> None:
    """Requests huge pages for the heap's next growth, up to the size that it keeps free.

    No page is touched, so no memory is used yet. A system without huge pages, or without space for so large a heap,
    leaves the heap unchanged.
    """
    libc.malloc.restype = ctypes.c_void_p
    if (start := libc.malloc(ctypes.c_size_t(_HUGE_BYTES))) is None:
        return
    page = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(start + _HUGE_BYTES - page), mmap.MADV_HUGEPAGE)
    libc.free(ctypes.c_void_p(start))
