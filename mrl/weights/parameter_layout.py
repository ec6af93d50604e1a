"""The six correspondences between Hugging Face tensors and a Megatron parameter: the kinds of a weight table's row.

Every kind is a pair of pure functions. `to_megatron` reads one tensor-parallel rank's shard directly from the Hugging
Face tensors (touching no more of them than it needs). `to_hf` takes the shards of all ranks and returns the Hugging
Face tensors, bit for bit.

kind         Hugging Face                  Megatron
copy         one tensor                    the same, sharded along `tp_dim` (not at all if None)
vocab        [vocab, h]                    rows sharded, zero rows appended up to the padded vocabulary
qkv          q, k, v projections           one query group after the other: query heads, key and value head of each; so
                                           are the projections of a gated delta net, by key head
gate_up      gate, up projections          a rank holds its part of gate, then its part of up
interleaved  columns alternate gate, up    rows of gate, then those of up, not sharded (a vector: its numbers)
transposed   columns                       rows, not sharded
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl.families import ModelArch
from mrl.families.rows import MappingKind, ParameterMapping

TRANSFORMED: tuple[MappingKind, ...] = ("interleaved", "transposed")  # kinds whose rows are columns on the other side


class Sliceable(Protocol):
    """A tensor, or something on disk that reads like one."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any, /) -> Tensor: ...


def to_megatron(
    row: ParameterMapping,
    sources: Sequence[Sliceable],
    arch: ModelArch,
    tp: int = 1,
    tp_rank: int = 0,
    padded_vocab: int = 0,
) -> Tensor:
    """Returns the shard of rank `tp_rank` of `tp`, in the dtype of `sources`.

    `padded_vocab` is the size of the Megatron vocabulary (all ranks), for kind vocab only; at least the model's. Raises
    ValueError if a dimension is not divisible by `tp`.
    """
    if row.kind == "vocab":
        return _vocab_shard(sources[0], max(padded_vocab, arch.vocab_size), tp, tp_rank)
    if row.pieces:
        sources = [_Range(sources[piece.source], piece.start, piece.rows) for piece in _pieces(row)]
    if row.kind == "qkv":
        return _qkv_shard(sources, row.groups or arch.num_kv_heads, tp, tp_rank)
    if row.kind == "gate_up":
        return torch.cat([source[_part(source.shape[0], tp, tp_rank)] for source in sources])
    source = sources[0]
    if row.kind in TRANSFORMED:
        rows = source[:].t()
        return rows if row.kind == "transposed" else torch.cat([rows[0::2], rows[1::2]])
    if row.tp_dim is None:
        return source[:]
    part = _part(source.shape[row.tp_dim], tp, tp_rank)
    return source[part] if row.tp_dim == 0 else source[:, part]


def to_hf(row: ParameterMapping, shards: Sequence[Tensor], arch: ModelArch) -> tuple[Tensor, ...]:
    """Returns the Hugging Face tensors of a parameter, given its shards in the order of the tensor-parallel ranks.

    The tensors are contiguous. A parameter that needs no rearranging is returned as a view of its memory: read it, do
    not write to it.
    """
    if row.pieces:
        places = list(_pieces(row))
        inner = row.shapes[0][1:]
        apart = replace(row, pieces=(), shapes=tuple((piece.rows, *inner) for piece in places))
        parts = list(zip(places, to_hf(apart, shards, arch), strict=True))
        return tuple(
            torch.cat([part for piece, part in parts if piece.source == index]) for index in range(len(row.hf))
        )
    if row.kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return tuple(_join([half[i] for half in halves], 0) for i in range(2))
    if row.kind in TRANSFORMED:
        rows = shards[0] if row.kind == "transposed" else torch.stack(shards[0].chunk(2), 1).flatten(0, 1)
        return (rows.t().contiguous(),)
    if row.tp_dim is None:
        return (shards[0].contiguous(),)
    full = _join(shards, row.tp_dim)
    if row.kind == "vocab":
        return (full[: arch.vocab_size],)
    if row.kind == "qkv":
        return _split_qkv(full, row, arch)
    return (full,)


def parameter_shape(row: ParameterMapping) -> tuple[int, ...]:
    """Returns the shape of the whole (unsharded, unpadded) Megatron parameter."""
    if row.kind in TRANSFORMED:
        return row.shapes[0][::-1]
    return sum(shape[0] for shape in row.shapes), *row.shapes[0][1:]


@dataclass(frozen=True)
class Segment:
    """`rows` rows of a Megatron parameter: those from `start` of the Hugging Face tensor number `source`."""

    source: int
    start: int
    rows: int


def segments(row: ParameterMapping, arch: ModelArch) -> Iterator[Segment]:
    """Yields the rows of the whole (unsharded, unpadded) Megatron parameter, from first to last.

    Segments describe `to_megatron` and `to_hf` at TP1 without a tensor. Every kind moves whole rows, except those that
    transpose a matrix (TURNED), which have no segments.
    """
    if row.kind in TRANSFORMED:
        return
    if row.kind != "qkv":
        yield from (Segment(i, 0, shape[0]) for i, shape in enumerate(row.shapes))
        return
    groups = row.groups or arch.num_kv_heads
    parts = list(_pieces(row) if row.pieces else (Segment(i, 0, shape[0]) for i, shape in enumerate(row.shapes)))
    for group in range(groups):
        for part in parts:
            size = part.rows // groups
            yield Segment(part.source, part.start + group * size, size)


@dataclass(frozen=True)
class _Range:
    """A range of rows of a tensor; no other rows are read."""

    whole: Sliceable
    start: int
    rows: int

    @property
    def shape(self) -> Sequence[int]:
        return (self.rows, *self.whole.shape[1:])

    def __getitem__(self, index: slice, /) -> Tensor:
        return self.whole[self.start + index.start : self.start + index.stop]


def _pieces(row: ParameterMapping) -> Iterator[Segment]:
    """Yields the place of each piece in the Hugging Face tensors."""
    for source in range(len(row.hf)):
        pieces = row.pieces_of(source)
        yield from (Segment(source, end - rows, rows) for rows, end in zip(pieces, accumulate(pieces), strict=True))


def _part(size: int, tp: int, tp_rank: int) -> slice:
    if size % tp:
        raise ValueError(f"a dimension of {size} cannot be split into {tp} equal parts")
    step = size // tp
    return slice(tp_rank * step, (tp_rank + 1) * step)


def _join(shards: Sequence[Tensor], dim: int) -> Tensor:
    return shards[0].contiguous() if len(shards) == 1 else torch.cat(tuple(shards), dim)


def _vocab_shard(source: Sliceable, padded: int, tp: int, tp_rank: int) -> Tensor:
    vocab = source.shape[0]
    part = _part(padded, tp, tp_rank)
    rows = source[min(part.start, vocab) : min(part.stop, vocab)]
    missing = part.stop - part.start - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _qkv_shard(sources: Sequence[Sliceable], groups: int, tp: int, tp_rank: int) -> Tensor:
    """Maps q [heads * d, ...], k and v [groups * d, ...] to [local groups * (heads a group + 2) * d, ...]."""
    here = _part(groups, tp, tp_rank)
    num = here.stop - here.start
    blocks = []
    for source in sources:
        rows = source.shape[0] // groups
        block = source[here.start * rows : here.stop * rows]
        blocks.append(block.reshape(num, rows, *block.shape[1:]))
    return torch.cat(blocks, 1).flatten(0, 1)


def _split_qkv(full: Tensor, row: ParameterMapping, arch: ModelArch) -> tuple[Tensor, ...]:
    groups = row.groups or arch.num_kv_heads
    parts = full.unflatten(0, (groups, -1)).split([shape[0] // groups for shape in row.shapes], dim=1)
    return tuple(part.flatten(0, 1).contiguous() for part in parts)
