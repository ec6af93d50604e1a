"""Batched copies of many tensors to the device and back, with one wait instead of one a tensor.

A copy between a GPU and pageable host memory goes through a small pinned buffer of the driver, and the host waits for
each. A copy from or to pinned memory is asynchronous.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

_ALIGN = 16  # bytes; a valid alignment for any dtype
_SLOT_BYTES = 64 << 20  # of each of two pinned buffers; larger ones are hardly faster


def to_device(tensors: Sequence[Tensor], where: torch.device) -> list[Tensor]:
    """Returns the tensors on `where`; the same tensors if that is the CPU.

    On a GPU they are views of one block, which is copied once from pinned memory; only users of the views wait for it.
    """
    if where.type == "cpu":
        return list(tensors)
    starts, total = _places(tensors)
    block = torch.empty(total, dtype=torch.uint8, pin_memory=where.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=True):
        _view(block, start, tensor).copy_(tensor)
    there = block.to(where, non_blocking=True)
    return [_view(there, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns complete copies in pageable host memory.

    Copies from a GPU alternate between two pinned buffers: one is filled while the other is emptied.
    """
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    copies = iter(copy_through_buffers(on_gpu, _SLOT_BYTES) if on_gpu else ())
    return [next(copies) if tensor.is_cuda else tensor.detach().to("cpu", copy=True) for tensor in tensors]


def copy_through_buffers(tensors: Sequence[Tensor], slot_bytes: int) -> list[Tensor]:
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    slots = [_PinnedBuffer(slot_bytes), _PinnedBuffer(slot_bytes)]
    for source, copy in _pieces(tensors, copies, slot_bytes):
        if slots[0].left < source.numel():
            slots.reverse()
            slots[0].empty()
        slots[0].add(source, copy)
    for slot in reversed(slots):
        slot.empty()
    return copies


class _PinnedBuffer:
    """Pinned buffer with the destinations of its content."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.left = nbytes
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.filled = torch.cuda.Event()

    def add(self, source: Tensor, target: Tensor) -> None:
        start = self.buffer.numel() - self.left
        part = self.buffer[start : start + source.numel()]
        part.copy_(source, non_blocking=True)
        self.waiting.append((part, target))
        self.left -= source.numel()
        self.filled.record()

    def empty(self) -> None:
        self.filled.synchronize()
        for part, target in self.waiting:
            target.copy_(part)
        self.waiting, self.left = [], self.buffer.numel()


def _pieces(tensors: Iterable[Tensor], copies: Iterable[Tensor], most: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs the bytes of each tensor with those of its copy, in pieces of at most `most` bytes."""
    for tensor, copy in zip(tensors, copies, strict=True):
        pair = (_bytes(tensor.detach().contiguous()), _bytes(copy))
        yield from zip(*(flat.split(most) for flat in pair), strict=True)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _places(tensors: Iterable[Tensor]) -> tuple[list[int], int]:
    """Returns the offset of each tensor in a block of bytes, and the block's length."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGN) * _ALIGN
    return starts, end


def _view(block: Tensor, start: int, like: Tensor) -> Tensor:
    """View of `block` at `start` with the shape and dtype of `like`."""
    nbytes = math.prod(like.shape) * like.dtype.itemsize
    return block[start : start + nbytes].view(like.dtype).view(like.shape)
