"""Plan for gathering packed sequences of different lengths into padded attention buckets, and back.

Sequences of similar length share a bucket. The gather indices depend on the lengths only: they are computed once a
micro-batch and used by all layers, forward and backward. Padding sits at the end, where the causal order hides it from
every real query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl import platform
from mrl.kernels.native.attention import Segments
from mrl.models.shared_tokens import is_first, slots_of
from mrl.units import starts

SAME_BUCKET_RATIO = 0.7  # a bucket's shortest sequence over its longest: at most half of the scores are padding
SHORT_TOKENS = 64  # up to this length padding is cheaper than another call


@dataclass(frozen=True)
class Bucket:
    """s segments of queries, padded to lq queries and lk keys.

    last_key [s, lq]: the last key that each query attends to; is_causal: that key is at the query's own position
    window: number of keys up to that one a query attends to; None: all
    sink: a first key is added, which all queries attend to
    """

    size: tuple[int, int]  # s, lq
    keys: tuple[int, int]  # s, lk
    last_key: Tensor
    is_causal: bool
    window: int | None = None
    sink: bool = False

    @property
    def scores(self) -> int:
        """Number of computed scores; kernels skip half of a causal square."""
        return math.prod(self.size) * self.keys[1] // (2 if self.is_causal else 1)

    @cached_property
    def mask(self) -> Tensor | None:
        """[s or 1, 1, lq, lk (1 more with a sink)]: the keys that each query attends to; None if causal order suffices.

        Built on demand, because it is much larger than its inputs.
        """
        window = None if self.window is None or self.keys[1] <= self.window else self.window
        if self.is_causal and window is None and not self.sink:
            return None
        key = torch.arange(self.keys[1], device=self.last_key.device)
        last = (key[None] if self.is_causal else self.last_key)[:, None, :, None]
        seen = key <= last
        if window is not None:
            seen &= key > last - window
        return F.pad(seen, (1, 0), value=True) if self.sink else seen


@dataclass(frozen=True)
class AttentionPlan:
    """Gather indices of packed tokens into padded buckets and back.

    query_index [P]: the local token behind each padded query slot (a segment's own first token behind padding)
    query_slot [q]: the padded slot of each querying token; query_tokens [q]: the querying tokens, None: all [t]
    result_slot [n]: the padded slot of each returned result; None: all, in place
    key_index [K]: the token behind each padded key slot, among the tokens of all context-parallel ranks
    key_slot [t]: the inverse, if every token is a key once (no context parallelism); if sequences share tokens
        [K], the slots of each token one after the other, from key_begin [t] on; else None
    in_place: the packed tokens equal the padded ones (longest first, no padding), so nothing has to be gathered
        except to skip tokens that do not query, or results that are not returned
    """

    buckets: tuple[Bucket, ...]
    query_index: Tensor
    query_slot: Tensor
    query_tokens: Tensor | None
    result_slot: Tensor | None
    key_index: Tensor
    key_slot: Tensor | None
    key_begin: Tensor | None
    in_place: bool
    _within: dict[tuple[int | None, bool], tuple[Bucket, ...]] = field(default_factory=dict)

    def within(self, window: int | None, *, sink: bool = False) -> tuple[Bucket, ...]:
        """Returns the buckets with this window and sink; built once for all layers that use them."""
        if window is None and not sink:
            return self.buckets
        if (window, sink) not in self._within:
            self._within[window, sink] = tuple(replace(b, window=window, sink=sink) for b in self.buckets)
        return self._within[window, sink]

    @cached_property
    def segments(self) -> Segments:
        """The same plan for tokens in place, without padding; on the CPU."""
        slot = torch.arange(len(self.query_index)) if self.result_slot is None else self.result_slot
        slot, order = slot.sort()
        queries, keys = (
            torch.cat([torch.full((size[0],), size[1]) for size in sizes])
            for sizes in ([b.size for b in self.buckets], [b.keys for b in self.buckets])
        )
        numbers = torch.arange(len(keys))
        segment = numbers.repeat_interleave(queries)[slot]
        last = torch.cat([bucket.last_key.flatten() for bucket in self.buckets])[slot]
        seen = torch.zeros_like(keys).scatter_reduce(0, segment, last + 1, "amax")
        place = torch.arange(len(self.key_index)) - starts(keys).repeat_interleave(keys)
        return Segments(
            query_starts=F.pad(segment.bincount(minlength=len(keys)).cumsum(0), (1, 0)),
            queries=self.query_index[slot],
            results=order,
            last=last,
            key_starts=F.pad(seen.cumsum(0), (1, 0)),
            keys=self.key_index[place < seen.repeat_interleave(keys)],
            longest=int(seen.max()),
        )

    def for_outputs(self, rows: Tensor) -> AttentionPlan:
        """Returns a plan that returns the results of the local tokens `rows` [n] only.

        On a CPU the other tokens do not query if that saves scores; on a GPU all query, since counting would
        synchronise.
        """
        if rows.device.type == "cpu":
            few = _FewQueries(self, rows)
            if few.scores < sum(bucket.scores for bucket in self.buckets):
                return few.plan()
        return replace(self, result_slot=self.query_slot.index_select(0, rows), _within={})

    @staticmethod
    def make(
        cu_seqlens: Tensor, cp: int, cp_rank: int, device: torch.device, shared_index: Tensor | None = None
    ) -> AttentionPlan:
        """Builds the plan.

        cu_seqlens [S + 1]: starts of the padded sequences before the context-parallel cut. shared_index: as in
        `mrl.core.PackedBatch`.
        """
        cu = cu_seqlens.to("cpu", torch.int64)
        cu = cu[torch.cat([cu.diff() > 0, torch.ones(1, dtype=torch.bool)])]
        builder, start, length = _PlanBuilder(cu, cp), cu[:-1], cu.diff()
        if shared_index is not None:
            builder.add_sharing(start, length, shared_index)
        elif cp == 1:
            builder.add(start=start, length=length, before=torch.zeros_like(length))
        else:
            chunk, local = length // (2 * cp), start // cp
            builder.add(start=local, length=chunk, before=cp_rank * chunk)
            builder.add(start=local + chunk, length=chunk, before=(2 * cp - 1 - cp_rank) * chunk)
        return builder.plan(device, shared_index)


class _PlanBuilder:
    """Builder of a plan; until `plan`, it numbers tokens as if every sequence had its own copy of shared ones."""

    def __init__(self, cu: Tensor, cp: int) -> None:
        self.cu, self.cp, self.tokens = cu, cp, int(cu[-1]) // cp
        self.buckets: list[Bucket] = []
        self.query_index: list[Tensor] = []
        self.key_index: list[Tensor] = []
        self.query_slot = torch.empty(self.tokens, dtype=torch.int64)
        self.slots = 0

    def add(self, *, start: Tensor, length: Tensor, before: Tensor, of: Tensor | None = None) -> None:
        """Adds one query segment for each sequence, or for the sequences `of`.

        A segment is the local tokens start .. start + length, `before` tokens after the sequence's start.
        """
        of = torch.arange(len(start)) if of is None else of
        for group in same_length_groups((before + length)[of]):
            for similar in same_length_groups(length[of[group]]):
                members = of[group[similar]]
                self._bucket(members, start[members], length[members], before[members])

    def add_sharing(self, start: Tensor, length: Tensor, shared_index: Tensor) -> None:
        """Adds sequences that share some of their first tokens.

        Shared tokens query without the tokens that follow them in any sequence: kernels would multiply non-finite ones
        by 0. They query again, unused, in each sequence if that means fewer scores: kernels skip half of a causal
        square, but nothing of a mask.
        """
        sequence, first = torch.arange(len(start)).repeat_interleave(length), is_first(shared_index)
        to_others = first & (shared_index.bincount()[shared_index] > 1)
        count = torch.arange(len(sequence)) - start[sequence] + 1
        shown = torch.zeros_like(length).scatter_reduce(0, sequence[to_others], count[to_others], "amax")
        common = F.pad((~first).cumsum(0), (1, 0))[self.cu].diff().maximum(shown)
        few = 2 * (length - common) < length
        before = common * few
        for members in (~few, few):
            self.add(start=start + before, length=length - before, before=before, of=members.nonzero()[:, 0])
        self.add(start=start, length=shown, before=torch.zeros_like(shown), of=shown.nonzero()[:, 0])

    def _bucket(self, sequence: Tensor, start: Tensor, length: Tensor, before: Tensor) -> None:
        offset = torch.arange(int(length.max()))
        real = offset < length[:, None]
        index = start[:, None] + offset * real
        self.query_slot[index[real]] = self.slots + real.flatten().nonzero()[:, 0]
        self.slots += index.numel()
        self.query_index.append(index.flatten())

        position = torch.arange(int((before + length).max()))
        key_real = position < (before + length)[:, None]
        self.key_index.append(self._tokens_of(sequence, position * key_real).flatten())
        size, keys = (len(sequence), offset.numel()), (len(sequence), position.numel())
        self.buckets.append(Bucket(size, keys, before[:, None] + offset * real, not before.any()))

    def _tokens_of(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Indices of position [s, lk] of each sequence among the tokens of all context-parallel ranks."""
        start = self.cu[:-1][sequence][:, None]
        if self.cp == 1:
            return start + position
        chunk = (self.cu.diff() // (2 * self.cp))[sequence][:, None]
        part = position // chunk
        second = part >= self.cp
        owner = torch.where(second, 2 * self.cp - 1 - part, part)
        return owner * self.tokens + start // self.cp + second * chunk + position % chunk

    def plan(self, device: torch.device, shared_index: Tensor | None) -> AttentionPlan:
        query, slot, key = torch.cat(self.query_index), self.query_slot, torch.cat(self.key_index)
        in_place = self.cp == 1 and self.slots == self.tokens and bool((slot.diff() == 1).all())
        back: tuple[Tensor, ...] = ()
        if shared_index is not None:
            query, slot, key, in_place = shared_index[query], slot[is_first(shared_index)], shared_index[key], False
            back = slots_of(key)
        needed = [query, slot, key, *back, *(bucket.last_key for bucket in self.buckets)]
        query, slot, key, *rest = platform.to_device(needed, device)
        back, last_key = tuple(rest[: len(back)]), rest[len(back) :]
        key_slot, key_begin = back or (slot if self.cp == 1 else None, None)
        return AttentionPlan(
            buckets=tuple(replace(b, last_key=last) for b, last in zip(self.buckets, last_key, strict=True)),
            query_index=query,
            query_slot=slot,
            query_tokens=None,
            result_slot=None if in_place else slot,
            key_index=key,
            key_slot=key_slot,
            key_begin=key_begin,
            in_place=in_place,
        )


class _FewQueries:
    """CPU plan in which only the tokens `rows` [n] query: the same segments attend to the same keys."""

    def __init__(self, whole: AttentionPlan, rows: Tensor) -> None:
        self.whole, self.rows = whole, rows
        self.index: list[Tensor] = []  # a bucket: [s, lq]
        self.last_key: list[Tensor] = []  # the same
        self.slot, self.slots = torch.empty_like(rows), 0
        slots, begin = whole.query_slot[rows], 0
        for bucket in whole.buckets:
            end = begin + math.prod(bucket.size)
            here = ((slots >= begin) & (slots < end)).nonzero()[:, 0]
            self._bucket(bucket, whole.query_index[begin:end].view(bucket.size)[:, :1], here, slots[here] - begin)
            begin = end

    def _bucket(self, bucket: Bucket, first: Tensor, here: Tensor, slot: Tensor) -> None:
        """first [s, 1]: the segments' first tokens; here: the `rows` in this bucket, at its slots `slot`."""
        segment, place = slot // bucket.size[1], slot % bucket.size[1]
        counts = segment.bincount(minlength=bucket.size[0])
        turn, order = torch.empty_like(segment), segment.argsort(stable=True)
        turn[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts)[segment[order]]
        most = max(1, int(counts.max()))  # a segment without queries still needs its keys' gradient slots
        index, last_key = first.repeat(1, most), bucket.last_key[:, :1].repeat(1, most)
        index[segment, turn] = self.rows[here]
        last_key[segment, turn] += place
        self.slot[here] = self.slots + segment * most + turn
        self.slots += index.numel()
        self.index.append(index)
        self.last_key.append(last_key)

    @property
    def scores(self) -> int:
        pairs = zip(self.index, self.whole.buckets, strict=True)
        return sum(index.numel() * bucket.keys[1] for index, bucket in pairs)

    def plan(self) -> AttentionPlan:
        pairs = zip(self.whole.buckets, self.last_key, strict=True)
        return replace(
            self.whole,
            buckets=tuple(replace(b, size=(*last.shape,), last_key=last, is_causal=False) for b, last in pairs),
            query_index=torch.cat([index.flatten() for index in self.index]),
            query_slot=self.slot,
            query_tokens=self.rows,
            result_slot=self.slot,
            _within={},
        )


def same_length_groups(lengths: Tensor) -> list[Tensor]:
    """Returns groups of indices of `lengths`, longest first, split where padding to the group's longest would cost
    too much.
    """
    order = lengths.argsort(descending=True, stable=True)
    ordered = lengths[order]
    groups, begin = [], 0
    while begin < order.numel():
        longest = int(ordered[begin])
        shortest = 0 if longest <= SHORT_TOKENS else SAME_BUCKET_RATIO * longest
        end = int((ordered >= shortest).sum())
        groups.append(order[begin:end])
        begin = end
    return groups
