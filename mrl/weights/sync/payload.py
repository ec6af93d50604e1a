"""Buckets: a sender's tensors contiguous in one flat byte buffer, and the pickles that describe them to an engine.

An engine unpickles with an allow-list of torch's own rebuild functions, so nothing here refers to an engine's classes:
transfers by value and shared memory use a list of (HF name, tensor); the flat form uses plain namespaces as metadata.
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
from mrl.inference.delta import DeltaMessage
from mrl.weights.meta import TensorMeta


class WeightSource(Protocol):
    """Source of weights for the sync: the used part of `mrl.weights.model.export.Exporter`."""

    @property
    def arch(self) -> ModelArch: ...
    def metas(self) -> Sequence[TensorMeta]: ...
    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor of its shape in `metas`) of the tensors that this rank sends, in their order."""


@dataclass(frozen=True)
class Slot:
    """Position of a tensor in a bucket: bytes [start, end)."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int

    def view(self, flat: Tensor) -> Tensor:
        """Returns the tensor's slot in the bucket's bytes, `flat` uint8 [n], as a view of its own shape and dtype."""
        return flat[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Slots without gaps, each aligned to its own dtype; `flat` buffers for it are uint8 of `nbytes` or more."""

    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        return self.slots[-1].end

    def views(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """Returns (name, view) of the tensors, each in its own shape, in the bucket's bytes `flat` uint8 [n]."""
        return [(slot.name, slot.view(flat)) for slot in self.slots]


def plan_buckets(
    metas: Sequence[TensorMeta], limit: int, at_once: Mapping[str, str] | None = None
) -> tuple[Bucket, ...]:
    """Splits one sender's tensors, in stream order, into buckets of at most `limit` bytes.

    at_once: groups of tensors that an engine loads only together, by name: they, and the tensors between them, are in
    one bucket of any size. A tensor larger than the limit has its own bucket. A bucket also ends before a tensor that
    would be misaligned, so that a receiver needs only names, dtypes and shapes.
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
    """Yields the tensors in order, in runs that no bucket may split."""
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
    """Starts torch's shared-memory manager process, which removes leftovers in /dev/shm; takes 0.2 s, once a process.

    The manager outlives this process by 2 s. It must not inherit connections, since their peers would wait as long.
    Signals are blocked meanwhile: torch hangs if it is interrupted while it reads from the manager.
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
    """Flat uint8 buffer [n] in /dev/shm that another process can map by name. The last user frees it."""

    def __init__(self, size: int) -> None:
        start_manager()
        self._storage = torch.UntypedStorage._new_using_filename_cpu(size)
        self.flat: Tensor = torch.empty(0, dtype=torch.uint8).set_(self._storage)

    def pickle(self, bucket: Bucket, readers: int) -> str:
        """Returns the base64 pickle of [(name, tensor)] whose tensors live in this buffer; valid for `readers`
        processes.

        Each reader releases one reference when it maps the buffer, so as many are taken here. A reader uses the
        shared-memory manager of its own process tree (b""): as a client of ours it would keep our manager, and its
        leftovers in /dev/shm, alive until it exits.
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
            location = (view.storage_offset(), tuple(view.shape), view.stride(), False)
            named.append((slot.name, _Call(reductions.rebuild_tensor, (torch.Tensor, typed[slot.dtype], location))))
        return _encode(named)


def pickle_by_value(bucket: Bucket, flat: Tensor) -> str:
    """Returns the base64 pickle of [(name, tensor)] with the bytes, [n] uint8 in `flat`, which must be on the CPU."""
    return _encode([(name, view.clone()) for name, view in bucket.views(flat)])


def pickle_message(message: DeltaMessage, changes: Tensor) -> str:
    """Returns the base64 pickle of [(message, changes)], uint8 [m], of a delta."""
    return _encode([(message.text(), changes.cpu().clone())])


def pickle_by_name(tensors: Mapping[str, Tensor]) -> str:
    """Returns the base64 pickle of {name: tensor} with the bytes: CPU tensors of any shape, each with its own
    storage.
    """
    return _encode(dict(tensors))


def pickle_flat(bucket: Bucket, flat: tuple[Callable[..., Any], tuple[Any, ...]]) -> str:
    """Returns the base64 pickle of {"flattened_tensor", "metadata"}; `flat` is the call that rebuilds the uint8 tensor
    [n].
    """
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
    """Object that pickles as `function(*args)`; an object referenced twice is rebuilt once."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


def _encode(value: Any) -> str:
    stream = io.BytesIO()
    pickle.Pickler(stream, protocol=4).dump(value)
    return base64.b64encode(stream.getbuffer()).decode()
