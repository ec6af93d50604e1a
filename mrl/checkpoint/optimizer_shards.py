"""Optimizer-sharded tensors, described in place as boxes of the parameters they belong to.

Each data-parallel rank holds a range of every flattened parameter: of main weights, moments and copies. Megatron's
form for checkpoints that load under any layout ("fully_reshardable") gathers the whole state on every rank before it
writes. Here a rank describes its own range as rectangular pieces of the same form's tensors, so nothing is gathered and
the result loads as Megatron's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from mrl import platform

platform.install()
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402

KINDS = ("param", "exp_avg", "exp_avg_sq")  # as Megatron names them; param: the main one
Shape = tuple[int, ...]
Where = Callable[[Tensor], Tensor]  # a tensor -> the same where its bytes are: `LearnerMemory.read`


def optimizer_shards(optimizer: Any, models: dict[str, Any], where: Where) -> list[ShardedTensor]:
    """Returns this rank's shards of a Megatron distributed optimizer (or a chain of them), uncopied.

    models: the model chunks' sharded state, before its factories are applied; `where` replaces its tensors, too
    """

    def state(part: Any, parameter: Tensor) -> dict[str, Tensor]:
        found = part._get_main_param_and_optimizer_states(parameter)
        return {f"optimizer.state.{kind}.": where(found[kind].detach()).view(-1) for kind in KINDS}

    return _shards(optimizer, models, where, state)


def weight_shards(
    optimizer: Any, models: dict[str, Any], where: Where, weights: dict[Tensor, Tensor]
) -> list[ShardedTensor]:
    """Returns shards of other weights of the model, under the model's own names.

    models, where: as in `optimizer_shards`
    weights: parameter -> [n], the range of it that this rank updates
    """
    return _shards(optimizer, models, where, lambda _, parameter: {"": weights[parameter].view(-1)})


def _shards(
    optimizer: Any, models: dict[str, Any], where: Where, read: Callable[[Any, Tensor], dict[str, Tensor]]
) -> list[ShardedTensor]:
    """read(part of the optimizer, parameter): the flat tensors of this rank's range, by the prefix of their names."""
    bases = [v for v in nested_values(models) if isinstance(v, ShardedTensor | ShardedTensorFactory)]
    by_parameter = {id(base.data): base for base in bases}
    for base in bases:
        base.data = where(base.data)
    shards: list[ShardedTensor] = []
    for part in optimizer_parts(optimizer):
        for parameter, start, end in _ranges(part):
            flat, base = read(part, parameter), by_parameter[id(parameter)]
            for tensor in _tensors(base):
                shards += _pieces(tensor, _start_in(tensor, base.data), start, end, flat)
    return shards


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Returns the optimizer's parts: with expert parallelism two, for dense and for expert parameters."""
    return list(optimizer.chained_optimizers) if hasattr(optimizer, "chained_optimizers") else [optimizer]


def boxes(shape: Shape, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yields the range start..end of a flattened tensor as (offset, size) of rectangular pieces, in the range's
    order.
    """
    if start >= end:
        return
    if len(shape) < 2:
        yield (start,) * len(shape), (end - start,) * len(shape)
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), end // inner  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * inner, end - last * inner)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, end - last * inner)


def _in_row(shape: Shape, row: int, start: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    if end - start < math.prod(shape[1:]):  # else it is a whole row, which is not a part
        for offset, size in boxes(shape[1:], start, end):
            yield (row, *offset), (1, *size)


def _ranges(part: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Yields (parameter, start, end): the elements of a flattened parameter that this rank updates."""
    for by_dtype in part.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _tensors(base: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    return [base] if isinstance(base, ShardedTensor) else list(nested_values(base.build()))


def _start_in(tensor: ShardedTensor, parameter: Tensor) -> int:
    """Returns the start of the tensor, a slice of the parameter with its own checkpoint entry, in the flattened
    parameter.
    """
    data = tensor.data
    if not data.is_contiguous() or data.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
        raise ValueError(f"{tensor.key}: its shard in the checkpoint is not a slice of the parameter")
    return data.storage_offset() - parameter.storage_offset()


def _pieces(tensor: ShardedTensor, at: int, start: int, end: int, flat: dict[str, Tensor]) -> Iterator[ShardedTensor]:
    """Yields the shards where `tensor` (elements from `at` of the flattened parameter) overlaps `flat` (`start` to
    `end`).
    """
    low, high = max(start, at), min(end, at + tensor.data.numel())
    outer = tensor.prepend_axis_num
    for offset, size in boxes(tuple(tensor.local_shape), low - at, high - at):
        count = math.prod(size)
        corner = [a + b for a, b in zip(tensor.global_offset[outer:], offset, strict=True)]
        for prefix, values in flat.items():
            data = values[low - start : low - start + count].view((1,) * outer + size)
            yield ShardedTensor(
                key=f"{prefix}{tensor.key}",
                data=data,
                dtype=data.dtype,
                local_shape=tuple(data.shape),
                global_shape=tensor.global_shape,
                global_offset=(*tensor.global_offset[:outer], *corner),
                axis_fragmentations=None,  # no regular grid
                replica_id=(*tensor.replica_id[:2], 0),  # no other data-parallel rank has it
                allow_shape_mismatch=tensor.allow_shape_mismatch,
            )
        low += count
