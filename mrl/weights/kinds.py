"""The six ways in which Hugging Face tensors and a Megatron parameter correspond: the kinds of a weight table's row.

Every kind is a pair of pure functions: `to_megatron` cuts one tensor-parallel rank's shard straight out of the Hugging
Face tensors (touching no more of them than it needs), `to_hf` takes the shards of all ranks and gives the Hugging Face
tensors back, bit for bit.

kind         Hugging Face                  Megatron
copy         one tensor                    the same, cut along `tp_dim` (not at all if None)
vocab        [vocab, h]                    rows cut, zero rows appended up to the padded vocabulary
qkv          q, k, v projections           a query group after the other: its query heads, its key and its value head
gate_up      gate, up projections          a rank holds its part of gate, then its part of up
interleaved  columns of gate, up in turns  rows of gate, then those of up, not cut (a vector: its numbers)
transposed   columns                       rows, not cut
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from mrl.families import ModelArch
from mrl.families.rows import Kind, Row

TURNED: tuple[Kind, ...] = ("interleaved", "transposed")  # whose rows are columns on the other side


class Sliceable(Protocol):
    """A tensor, or something on disk that reads like one."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self, index: Any, /) -> Tensor: ...


def to_megatron(
    row: Row, sources: Sequence[Sliceable], arch: ModelArch, tp: int = 1, tp_rank: int = 0, padded_vocab: int = 0
) -> Tensor:
    """The shard of rank `tp_rank` of `tp`, in the dtype of `sources`.

    `padded_vocab` is the Megatron vocabulary (all ranks), for kind vocab only; at least the model's.
    Raises ValueError if a cut does not come out even.
    """
    if row.kind == "vocab":
        return _vocab_shard(sources[0], max(padded_vocab, arch.vocab_size), tp, tp_rank)
    if row.pieces:
        sources = _pieces(row, sources[0])
    if row.kind == "qkv":
        return _qkv_shard(sources, arch, tp, tp_rank)
    if row.kind == "gate_up":
        return torch.cat([source[_part(source.shape[0], tp, tp_rank)] for source in sources])
    source = sources[0]
    if row.kind in TURNED:
        rows = source[:].t()
        return rows if row.kind == "transposed" else torch.cat([rows[0::2], rows[1::2]])
    if row.tp_dim is None:
        return source[:]
    part = _part(source.shape[row.tp_dim], tp, tp_rank)
    return source[part] if row.tp_dim == 0 else source[:, part]


def to_hf(row: Row, shards: Sequence[Tensor], arch: ModelArch) -> tuple[Tensor, ...]:
    """The Hugging Face tensors of a parameter, given its shards in the order of the tensor-parallel ranks.

    Contiguous. A parameter that needs no rearranging is returned as a view of its memory: read it, do not write to it.
    """
    if row.pieces:
        return (torch.cat(to_hf(replace(row, pieces=()), shards, arch)),)
    if row.kind == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return tuple(_join([half[i] for half in halves], 0) for i in range(2))
    if row.kind in TURNED:
        rows = shards[0] if row.kind == "transposed" else torch.stack(shards[0].chunk(2), 1).flatten(0, 1)
        return (rows.t().contiguous(),)
    if row.tp_dim is None:
        return (shards[0].contiguous(),)
    full = _join(shards, row.tp_dim)
    if row.kind == "vocab":
        return (full[: arch.vocab_size],)
    if row.kind == "qkv":
        return _split_qkv(full, arch)
    return (full,)


def parameter_shape(row: Row) -> tuple[int, ...]:
    """Of the whole (unsharded, unpadded) Megatron parameter."""
    if row.kind in TURNED:
        return row.shapes[0][::-1]
    return sum(shape[0] for shape in row.shapes), *row.shapes[0][1:]


@dataclass(frozen=True)
class Segment:
    """`rows` rows of a Megatron parameter, which are those from `start` of the Hugging Face tensor number `source`."""

    source: int
    start: int
    rows: int


def segments(row: Row, arch: ModelArch) -> Iterator[Segment]:
    """The rows of the whole (unsharded, unpadded) Megatron parameter, from the first to the last.

    What `to_megatron` and `to_hf` do at TP1, told without a tensor: every kind moves whole rows, but for those that
    turn a matrix (TURNED), of which there are none.
    """
    if row.kind in TURNED:
        return
    if row.kind != "qkv":
        yield from (Segment(i, 0, shape[0]) for i, shape in enumerate(row.shapes))
        return
    sizes = [rows // arch.num_kv_heads for rows in row.pieces or (shape[0] for shape in row.shapes)]
    starts = [(i, 0) for i in range(len(sizes))]
    if row.pieces:
        starts = [(0, start) for start in accumulate(row.pieces[:-1], initial=0)]
    for group in range(arch.num_kv_heads):
        for (source, start), size in zip(starts, sizes, strict=True):
            yield Segment(source, start + group * size, size)


@dataclass(frozen=True)
class _Range:
    """Rows of a tensor, of which no others are read."""

    whole: Sliceable
    start: int
    rows: int

    @property
    def shape(self) -> Sequence[int]:
        return (self.rows, *self.whole.shape[1:])

    def __getitem__(self, index: slice, /) -> Tensor:
        return self.whole[self.start + index.start : self.start + index.stop]


def _pieces(row: Row, whole: Sliceable) -> list[Sliceable]:
    starts = accumulate(row.pieces[:-1], initial=0)
    return [_Range(whole, start, rows) for start, rows in zip(starts, row.pieces, strict=True)]


def _part(size: int, tp: int, tp_rank: int) -> slice:
    if size % tp:
        raise ValueError(f"a dimension of {size} cannot be cut into {tp} equal parts")
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


def _qkv_shard(sources: Sequence[Sliceable], arch: ModelArch, tp: int, tp_rank: int) -> Tensor:
    """q [heads * d, ...], k and v [groups * d, ...] -> [local groups * (heads a group + 2) * d, ...]."""
    groups = _part(arch.num_kv_heads, tp, tp_rank)
    num = groups.stop - groups.start
    blocks = []
    for source in sources:
        rows = source.shape[0] // arch.num_kv_heads
        block = source[groups.start * rows : groups.stop * rows]
        blocks.append(block.reshape(num, rows, *block.shape[1:]))
    return torch.cat(blocks, 1).flatten(0, 1)


def _split_qkv(full: Tensor, arch: ModelArch) -> tuple[Tensor, ...]:
    query_rows = arch.num_heads // arch.num_kv_heads * arch.head_dim
    grouped = full.reshape(arch.num_kv_heads, query_rows + 2 * arch.head_dim, *full.shape[1:])
    parts = grouped.split([query_rows, arch.head_dim, arch.head_dim], dim=1)
    return tuple(part.flatten(0, 1).contiguous() for part in parts)
