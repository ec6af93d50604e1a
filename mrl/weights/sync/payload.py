"""Buckets: a sender's tensors end to end in one flat byte buffer, and the pickles that describe them to an engine.

An engine unpickles with an allow-list of torch's own rebuild functions, so nothing here refers to an engine's classes:
by value and shared memory use a list of (HF name, tensor); the flat form uses plain namespaces as its metadata.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from mrl.families import ModelArch
from mrl.weights.meta import TensorMeta


class WeightSource(Protocol):
    """`mrl.weights.model.export.Exporter`, as far as the sync needs it."""

    @property
    def arch(self) -> ModelArch: ...
    def metas(self) -> Sequence[TensorMeta]: ...
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor of the shape that `metas` says) of the tensors that this rank sends, in their order."""


@dataclass(frozen=True)
class Slot:
    """A tensor's place in a bucket: bytes [start, end)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int

    def view(self, flat: Tensor) -> Tensor:
        """The tensor's place in the bucket's bytes, `flat` uint8 [n], under its own shape and dtype."""
        return flat[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Slots without gaps, each aligned to its own dtype; `flat` buffers that hold it are uint8 of `nbytes` or more."""

    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        return self.slots[-1].end

    def views(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """(name, view) of the tensors, each in its own shape, in the bucket's bytes `flat` uint8 [n]."""
        return [(slot.name, slot.view(flat)) for slot in self.slots]


def plan_buckets(
    metas: Sequence[TensorMeta], limit: int, at_once: Mapping[str, str] | None = None
) -> tuple[Bucket, ...]:
    """One sender's tensors in stream order, cut into buckets of at most `limit` bytes.

    at_once: names of tensors that an engine takes only with others of the same value: they, and what is between them,
    travel in one bucket, as large as it may be. So does a tensor larger than the limit in its own. A bucket also ends
    where the next tensor would be misaligned, so that it can be received without knowing more than names, dtypes and
    shapes.
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    offset = 0
    for run in _runs(metas, at_once or {}):
        size = sum(meta.nbytes for meta in run)
        if slots and (offset + size > limit or offset % max(meta.dtype.itemsize for meta in run)):
            buckets.append(Bucket(tuple(slots)))
            slots, offset = [], 0
        for meta in run:
            slots.append(Slot(meta.name, meta.shape, meta.dtype, offset, offset + meta.nbytes))
            offset += meta.nbytes
    if slots:
        buckets.append(Bucket(tuple(slots)))
    return tuple(buckets)


def _runs(metas: Sequence[TensorMeta], at_once: Mapping[str, str]) -> Iterator[list[TensorMeta]]:
    """The tensors in their order, in pieces that no bucket may cut."""
    last = {at_once[meta.name]: i for i, meta in enumerate(metas) if meta.name in at_once}
    run: list[TensorMeta] = []
    end = 0
    for i, meta in enumerate(metas):
        run.append(meta)
        end = max(end, last.get(at_once.get(meta.name, ""), i))
        if i == end:
            yield run
            run = []


@functools.cache
def start_manager() -> None:
    """Torch's process that clears up what this one leaves in /dev/shm, which takes .2 s; once a process.

    It lives 2 s longer than this process, and would hold its connections open as long: its peers would wait for it.
    No signal comes meanwhile: torch, interrupted where it reads what that process says, would never go on.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with contextlib.suppress(OSError):  # the folder's own
                os.set_inheritable(number, False)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        torch.UntypedStorage._new_using_filename_cpu(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class SharedBuffer:
    """A flat uint8 buffer in /dev/shm that another process can map by name. Freed with the last user of it."""

    def __init__(self, size: int) -> None:
        start_manager()
        self._storage = torch.UntypedStorage._new_using_filename_cpu(size)
        self.flat: Tensor = torch.empty(0, dtype=torch.uint8).set_(self._storage)

    def pickle(self, bucket: Bucket, readers: int) -> str:
        """base64 pickle of [(name, tensor)] whose tensors live in this buffer; valid for `readers` processes.

        Each reader gives back one reference when it maps the buffer, so as many are taken here. A reader is sent to
        the shared-memory manager process of its own tree (b""): as a client of ours it would keep ours running, and
        what we leave behind in /dev/shm, until it ends itself.
        """
        _, handle, size = self._storage._share_filename_cpu_()
        for _ in range(readers):
            self._storage._shared_incref()
        untyped = _Call(reductions.rebuild_storage_filename, (torch.UntypedStorage, b"", handle, size))
        typed = {
            dtype: _Call(reductions.rebuild_typed_storage, (untyped, dtype))
            for dtype in {slot.dtype for slot in bucket.slots}
        }
        named = []
        for slot in bucket.slots:
            view = slot.view(self.flat)
            place = (view.storage_offset(), tuple(view.shape), view.stride(), False)
            named.append((slot.name, _Call(reductions.rebuild_tensor, (torch.Tensor, typed[slot.dtype], place))))
        return _encode(named)


def pickle_by_value(bucket: Bucket, flat: Tensor) -> str:
    """base64 pickle of [(name, tensor)], the bytes included; `flat` must be on the CPU."""
    return _encode([(name, view.clone()) for name, view in bucket.views(flat)])


def pickle_by_name(tensors: Mapping[str, Tensor]) -> str:
    """base64 pickle of {name: tensor}, the bytes included: tensors on the CPU, each with a storage of its own."""
    return _encode(dict(tensors))


def pickle_flat(bucket: Bucket, flat: tuple[Callable[..., Any], tuple[Any, ...]]) -> str:
    """base64 pickle of {"flattened_tensor", "metadata"}; `flat` is the call that rebuilds the uint8 tensor."""
    metadata = [
        SimpleNamespace(
            name=slot.name,
            shape=torch.Size(slot.shape),
            dtype=slot.dtype,
            start_idx=slot.start,
            end_idx=slot.end,
            numel=slot.end - slot.start,
        )
        for slot in bucket.slots
    ]
    return _encode({"flattened_tensor": _Call(*flat), "metadata": metadata})


class _Call:
    """Pickles as `function(*args)`; one object referred to twice is rebuilt once."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


def _encode(value: Any) -> str:
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=4).dump(value)
    return base64.b64encode(stream.getbuffer()).decode()
