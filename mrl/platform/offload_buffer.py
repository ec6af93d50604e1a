"""Offloads device memory to host memory and back; tensors and views stay valid.

Offloading resizes a tensor's whole storage to zero, and reloading resizes it back. So all views, Megatron's buffers and
the optimizer's references keep their identity, and the bytes return to the same places.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, UntypedStorage

ALIGNMENT = 512  # bytes, of a storage's offset in the buffer


class OffloadBuffer:
    """Host buffer for some storages in one piece, pinned with CUDA; made at first use and reused while the sizes match.

    No storage may be read or written while it is offloaded.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._sizes: list[int] = []
        self.is_offloaded = False
        self._offloaded: list[tuple[UntypedStorage, int]] = []  # with their offsets
        self._offsets: dict[int, int] = {}  # the same offsets by storage identity

    def offload(self, storages: Sequence[UntypedStorage], *, same: bool = False) -> int:
        """Offloads the storages; returns the copied bytes. If it raises (no host memory), nothing has changed.

        same: the storages still hold what the last `reload` restored, so nothing is copied
        """
        assert not self.is_offloaded
        if not all(storage.resizable() for storage in storages):
            raise RuntimeError("this memory is shared, for example with a numpy array: it cannot be offloaded")
        sizes, copied = [storage.nbytes() for storage in storages], 0
        same = same and self._buffer is not None and sizes == self._sizes
        if not same:
            self._fit(sizes)
            with copy_stream():
                for storage, place in zip(storages, self._places(), strict=True):
                    self._bytes(place, storage.nbytes()).copy_(_flat(storage), non_blocking=True)
            copied = sum(sizes)
        self._offloaded = list(zip(storages, self._places(), strict=True))
        self._offsets = {storage._cdata: place for storage, place in self._offloaded}
        for storage in storages:
            storage.resize_(0)
        self.is_offloaded = True
        return copied

    def reload(self) -> int:
        """Allocates device memory and reloads the bytes; returns their number. If it raises (no device memory), the
        storages stay offloaded."""
        try:
            for (storage, _), size in zip(self._offloaded, self._sizes, strict=True):
                storage.resize_(size)
        except BaseException:
            for storage, _ in self._offloaded:
                storage.resize_(0)
            raise
        with copy_stream():
            for storage, place in self._offloaded:
                _flat(storage).copy_(self._bytes(place, storage.nbytes()), non_blocking=True)
        self._offloaded, self._offsets, self.is_offloaded = [], {}, False
        return sum(self._sizes)

    def host_view(self, tensor: Tensor) -> Tensor | None:
        """Returns the host view of a tensor whose storage is offloaded, for reading and writing; else None."""
        place = self._offsets.get(tensor.untyped_storage()._cdata)
        if place is None:
            return None
        assert self._buffer is not None
        offset = place // tensor.element_size() + tensor.storage_offset()
        buffer = torch.empty(0, dtype=tensor.dtype)
        return buffer.set_(self._buffer.untyped_storage(), offset, tensor.size(), tensor.stride())

    def _fit(self, sizes: list[int]) -> None:
        if self._buffer is None or sizes != self._sizes:
            self._buffer, self._sizes = None, sizes  # freed first: two buffers may not fit
            self._buffer = allocate_host_memory(sum(map(_aligned, sizes)))

    def _places(self) -> list[int]:
        places = [0]
        for size in self._sizes:
            places.append(places[-1] + _aligned(size))
        return places[:-1]

    def _bytes(self, place: int, size: int) -> Tensor:
        assert self._buffer is not None
        return self._buffer[place : place + size]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _flat(storage: UntypedStorage) -> Tensor:
    """Returns the bytes of a storage as a tensor."""
    flat: Tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return flat


def allocate_host_memory(nbytes: int) -> Tensor:
    """Returns [nbytes] uint8 on pages of its own, pinned with CUDA. Raises OSError or RuntimeError without enough
    memory.

    torch's own allocator would round pinned memory up to a power of two.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if torch.cuda.is_available():
        runtime = torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 1)):  # 1: for all contexts
            raise RuntimeError(f"{nbytes} bytes of host memory cannot be pinned: CUDA error {code}")
        weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer


def host_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a contiguous host tensor, valid while the tensor lives.

    `numpy()` would prevent the tensor's memory from being released for good.
    """
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


@contextlib.contextmanager
def copy_stream() -> Iterator[None]:
    """Runs `non_blocking` copies of the block on a stream of their own; they are complete at its end."""
    if not torch.cuda.is_available():
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
