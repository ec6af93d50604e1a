"""Deltas of weights: the encoding of a bucket's changed elements, and the application in the engine's process.

SGLang calls `load` as a custom weight loader (`--custom-weight-loader mrl.inference.delta.load`); mrl's own
transformers engine calls `apply`. An engine's parameters are fused, sharded and sometimes transposed, so only the
model's own `load_weights` knows the position of a changed element in them. A delta therefore becomes tensors of full
shape in which all other elements are NaN, and `load_weights` runs while every copy into a parameter skips NaN elements.
Concatenation, slicing, transposition and casts keep NaN, so the result is exact without a second copy of the weights in
the engine. A loader that computes one element from several others would spread NaN; the first delta is always verified
by checksum.

A custom loader cannot answer "refused" in SGLang: an engine without the base version raises, which ends its process.
The sender therefore asks every engine for its version first, and only a misuse gets that far.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

LOADER: Literal["mrl.inference.delta.load"] = "mrl.inference.delta.load"
LONG = 255  # a byte of a gap: 255 more unchanged units, and the gap continues
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STATE = "_mrl_weights"  # attribute of the engine's model


@dataclass(frozen=True)
class DeltaMessage:
    """Message about the weights from `base` (None: whole weights) to `version`. `open` begins, `close` ends such an
    update; `bucket` has one bucket's changes.

    tensors: (name, dtype, shape) of the bucket, without gaps. unit: bytes that are compared at once; changed: number of
    changed units; nbytes: of the encoded changes. group: process group that broadcasts them; None: in the request
    """

    step: Literal["open", "bucket", "close"]
    base: str | None
    version: str
    tensors: Sequence[tuple[str, str, Sequence[int]]] = ()
    unit: int = 1
    changed: int = 0
    nbytes: int = 0
    group: str | None = None

    def text(self) -> str:
        """Returns the message as the name of the tensor that has the changes."""
        return json.dumps(asdict(self))


def encode(new: Tensor, old: Tensor, unit: int) -> tuple[Tensor | None, int]:
    """Returns the changes from `old` to `new`, both uint8 [n], and the number of changed units.

    Changes are uint8 [m]: the values of changed units, and the gaps between these, one byte each and one more for every
    255 units of a gap. None if they would be as large as the bucket.
    """
    units = _units(new, unit)
    differs = units != _units(old, unit)
    changed = int(differs.sum())
    if changed * (unit + 1) + units.numel() // LONG >= new.numel():
        return None, changed
    where = differs.nonzero().squeeze(1)
    gaps = where.diff(prepend=where.new_full((1,), -1)) - 1
    ends = (gaps // LONG + 1).cumsum(0) - 1
    coded = torch.full((int(ends[-1]) + 1 if changed else 0,), LONG, dtype=torch.uint8, device=new.device)
    coded[ends] = (gaps % LONG).to(torch.uint8)
    return torch.cat([units[where].view(torch.uint8), coded]), changed


def _units(flat: Tensor, unit: int) -> Tensor:
    """Returns bytes uint8 [n] as integers of `unit` bytes; the last one may continue with zeros."""
    return (nn.functional.pad(flat, (0, -flat.numel() % unit)) if flat.numel() % unit else flat).view(UNITS[unit])


def decode(changes: Tensor, nbytes: int, unit: int, changed: int) -> Tensor:
    """Returns uint8 [nbytes]: changed units have their values, all other bytes are 0xFF, which is NaN in every floating
    dtype.
    """
    flat = torch.full((nbytes + -nbytes % unit,), 0xFF, dtype=torch.uint8, device=changes.device)
    values, gaps = changes[: changed * unit], changes[changed * unit :]
    where = gaps.cumsum(0, dtype=torch.int64)[gaps < LONG] + torch.arange(changed, device=changes.device)
    flat.view(UNITS[unit])[where] = values.view(UNITS[unit])
    return flat[:nbytes]


def load(model: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Applies messages in a process of SGLang. named: (DeltaMessage as text, changes uint8 [m])."""
    apply(model, model.load_weights, named)


def apply(
    model: nn.Module, load_weights: Callable[[list[tuple[str, Tensor]]], Any], named: Iterable[tuple[str, Tensor]]
) -> None:
    """Applies messages to `model`, whose `load_weights` takes (Hugging Face name, whole tensor).

    Raises ValueError if the model does not have the weights that a message starts from.
    """
    for text, changes in named:
        message = DeltaMessage(**json.loads(text))
        held, update = getattr(model, _STATE, None), (message.base, message.version)
        needed = message.base if message.step == "open" else update
        if held != needed and (message.step, message.base) != ("open", None):
            raise ValueError(f"delta weight sync, {message.step}: needs weights {needed}, and this engine has {held}")
        if message.step == "bucket":
            setattr(model, _STATE, None)  # a failure leaves no version
            memory = [*model.parameters(), *model.buffers()]
            if message.group is not None:
                changes = torch.empty(message.nbytes, dtype=torch.uint8, device=memory[0].device)
                group = dist.distributed_c10d._resolve_process_group(message.group)  # type: ignore[arg-type]
                dist.broadcast(changes, src=0, group=group)
            with _keeping_where_nan(memory):
                load_weights(list(_tensors(message, changes)))
        setattr(model, _STATE, message.version if message.step == "close" else update)


def forget(model: nn.Module) -> None:
    """Makes `model` refuse deltas until whole weights arrive."""
    setattr(model, _STATE, None)


def _tensors(message: DeltaMessage, changes: Tensor) -> Iterator[tuple[str, Tensor]]:
    shapes = [(name, getattr(torch, dtype), shape) for name, dtype, shape in message.tensors]
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in shapes]
    parts = decode(changes, sum(sizes), message.unit, message.changed).split(sizes)
    for (name, dtype, shape), part in zip(shapes, parts, strict=True):
        yield name, part.view(dtype).view(shape)


@contextlib.contextmanager
def _keeping_where_nan(memory: Sequence[Tensor]) -> Iterator[None]:
    """`_KeepWhereNaN` in this thread, and in those of pools that get their work within the context: SGLang's loaders of
    DeepSeek models copy in such threads, and a dispatch mode belongs to one thread.
    """
    submit = ThreadPoolExecutor.submit

    def submit_masked(pool: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def masked() -> Any:
            with _KeepWhereNaN(memory):
                return call(*args, **kwargs)

        return submit(pool, masked)

    ThreadPoolExecutor.submit = submit_masked  # type: ignore[method-assign,assignment]
    try:
        with _KeepWhereNaN(memory):
            yield
    finally:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


class _KeepWhereNaN(TorchDispatchMode):
    """Within the context, a copy into `memory` keeps the elements for which the source is NaN."""

    def __init__(self, memory: Iterable[Tensor]) -> None:
        super().__init__()
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in memory}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self._memory:
            held, new = args[0], args[1].to(args[0].device)
            args = (held, torch.where(new.isnan(), held, new.to(held.dtype)), *args[2:])
        return func(*args, **(kwargs or {}))
