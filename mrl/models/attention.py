"""Causal attention over packed sequences in plain torch: grouped queries, context parallelism, no loop over sequences.

Sequences of similar length share a bucket: they are gathered into one padded batch, and each bucket is one call of
scaled_dot_product_attention. Padding sits at the end, where the causal order hides it from every real query. The
gather indices depend on the lengths only; they are computed once a micro-batch (`AttentionPlan`) and used by all
layers, forward and backward.

Context parallelism: rank r holds chunks r and 2 * cp - 1 - r of every sequence. Keys and values are all-gathered
(their gradients reduce-scattered); each chunk of queries attends to the keys up to its own end, so no rank computes
scores that the mask would drop except in its diagonal chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl import platform
from mrl.kernels.layers import rotate
from mrl.models.mcore import (
    MegatronModule,
    ProcessGroupCollection,
    TransformerConfig,
    gather_from_sequence_parallel_region,
)

SAME_BUCKET_RATIO = 0.7  # a bucket's shortest sequence over its longest: at most half of the scores are padding
SHORT_TOKENS = 64  # up to this length padding is cheaper than another call


@dataclass(frozen=True)
class Bucket:
    """s segments of queries, padded to lq queries and lk keys. mask [s, 1, lq, lk], None where causal order is all."""

    size: tuple[int, int]  # s, lq
    keys: tuple[int, int]  # s, lk
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """How to gather packed tokens into padded buckets and back.

    query_index [P]: the local token behind each padded query slot (a segment's own first token behind padding)
    query_slot [t]: the padded slot of each local token
    key_index [K]: the token behind each padded key slot, among the tokens of all context-parallel ranks
    key_slot [t]: the inverse, where every token is a key once (no context parallelism), else None
    in_place: the packed tokens are the padded ones already (longest first, no padding): nothing has to be gathered
    """

    buckets: tuple[Bucket, ...]
    query_index: Tensor
    query_slot: Tensor
    key_index: Tensor
    key_slot: Tensor | None
    in_place: bool
    _within: dict[int, tuple[Bucket, ...]] = field(default_factory=dict)

    def within(self, window: int | None) -> tuple[Bucket, ...]:
        """The buckets, whose queries see the last `window` keys only of those that they would see; made once for all
        layers with that window."""
        if window is None:
            return self.buckets
        if window not in self._within:
            self._within[window] = tuple(_cut(bucket, window, self.query_index.device) for bucket in self.buckets)
        return self._within[window]

    @staticmethod
    def make(cu_seqlens: Tensor, cp: int, cp_rank: int, device: torch.device) -> AttentionPlan:
        """cu_seqlens [S + 1]: starts of the padded sequences before the context-parallel cut."""
        cu = cu_seqlens.to("cpu", torch.int64)
        cu = cu[torch.cat([cu.diff() > 0, torch.ones(1, dtype=torch.bool)])]
        builder = _PlanBuilder(cu, cp, cp_rank)
        if cp == 1:
            builder.add(start=cu[:-1], length=cu.diff(), before=torch.zeros_like(cu[:-1]))
        else:
            chunk = cu.diff() // (2 * cp)
            local = cu[:-1] // cp
            builder.add(start=local, length=chunk, before=cp_rank * chunk)
            builder.add(start=local + chunk, length=chunk, before=(2 * cp - 1 - cp_rank) * chunk)
        return builder.plan(device)


class _PlanBuilder:
    def __init__(self, cu: Tensor, cp: int, cp_rank: int) -> None:
        self.cu, self.cp, self.tokens = cu, cp, int(cu[-1]) // cp
        self.buckets: list[Bucket] = []
        self.query_index: list[Tensor] = []
        self.key_index: list[Tensor] = []
        self.last_key: list[Tensor] = []  # a bucket: [s, lq], each query's place in its sequence
        self.query_slot = torch.empty(self.tokens, dtype=torch.int64)
        self.slots = 0

    def add(self, *, start: Tensor, length: Tensor, before: Tensor) -> None:
        """One segment of queries a sequence: local tokens start .. start + length, `before` tokens after its start."""
        for members in same_length_groups(before + length):
            self._bucket(members, start[members], length[members], before[members])

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
        self.buckets.append(Bucket((len(sequence), offset.numel()), (len(sequence), position.numel()), None))
        if self.cp > 1:
            self.last_key.append(before[:, None] + offset * real)

    def _tokens_of(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Where position [s, lk] of each sequence lies among the tokens of all context-parallel ranks."""
        start = self.cu[:-1][sequence][:, None]
        if self.cp == 1:
            return start + position
        chunk = (self.cu.diff() // (2 * self.cp))[sequence][:, None]
        part = position // chunk
        second = part >= self.cp
        owner = torch.where(second, 2 * self.cp - 1 - part, part)
        return owner * self.tokens + start // self.cp + second * chunk + position % chunk

    def plan(self, device: torch.device) -> AttentionPlan:
        indices = [torch.cat(self.query_index), self.query_slot, torch.cat(self.key_index)]
        query, slot, key, *last_key = platform.to_device([*indices, *self.last_key], device)
        buckets = self.buckets
        if self.cp > 1:
            pairs = zip(buckets, last_key, strict=True)
            buckets = [replace(bucket, mask=_up_to(last, bucket.keys[1])) for bucket, last in pairs]
        in_place = self.cp == 1 and self.slots == self.tokens and bool((self.query_slot.diff() == 1).all())
        return AttentionPlan(
            buckets=tuple(buckets),
            query_index=query,
            query_slot=slot,
            key_index=key,
            key_slot=slot if self.cp == 1 else None,
            in_place=in_place,
        )


def _up_to(last_key: Tensor, keys: int) -> Tensor:
    """[s, lq] -> bool [s, 1, lq, keys], made where it is used: it is much larger than what it follows from."""
    position = torch.arange(keys, device=last_key.device)
    return (position <= last_key[:, :, None])[:, None]


def _cut(bucket: Bucket, window: int, device: torch.device) -> Bucket:
    """A query's place in its sequence is the number of keys that it sees, less one."""
    keys = bucket.keys[1]
    if keys <= window:
        return bucket
    position = torch.arange(keys, device=device)
    mask = _up_to(position[None], keys) if bucket.mask is None else bucket.mask
    return replace(bucket, mask=mask & (position > mask.sum(-1, keepdim=True) - 1 - window))


def same_length_groups(lengths: Tensor) -> list[Tensor]:
    """Indices of `lengths`, longest first, cut where padding to the group's longest would cost too much."""
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


class _Spread(torch.autograd.Function):
    """x[index], where padding slots get no gradient: the backward pass is a gather by `slot`, not a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slot,) = ctx.saved_tensors
        return grad.index_select(0, slot), None, None


class _Collect(torch.autograd.Function):
    """x[slot], where each slot is taken once: the backward pass is a copy into zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(slot)
        ctx.slots = x.size(0)
        return x.index_select(0, slot)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slot,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.slots, *grad.shape[1:])
        return out.index_copy_(0, slot, grad), None


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
) -> Tensor:
    """query [t, h, d]; key, value [all ranks' tokens, groups, d] -> [t, h, d]."""
    q = query if plan.in_place else _Spread.apply(query, plan.query_index, plan.query_slot)
    if plan.in_place:
        k, v = key, value
    elif plan.key_slot is not None:
        k, v = (_Spread.apply(x, plan.key_index, plan.key_slot) for x in (key, value))
    else:
        k, v = key.index_select(0, plan.key_index), value.index_select(0, plan.key_index)
    buckets: Sequence[Bucket] = plan.within(window)
    q_parts = q.split([math.prod(b.size) for b in buckets])
    k_parts, v_parts = (x.split([math.prod(b.keys) for b in buckets]) for x in (k, v))
    parts = zip(buckets, q_parts, k_parts, v_parts, strict=True)
    outputs = [_bucket_attention(bucket, qb, kb, vb, scale) for bucket, qb, kb, vb in parts]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if plan.in_place else _Collect.apply(joined, plan.query_slot)


def _bucket_attention(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query [s * lq, h, d]; key, value [s * lk, groups, d] -> [s * lq, h, d]."""
    q = query.unflatten(0, bucket.size).transpose(1, 2)
    k, v = (x.unflatten(0, bucket.keys).transpose(1, 2) for x in (key, value))
    causal = bucket.mask is None
    if _needs_own_keys(q, bucket.mask):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, bucket.mask, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def _needs_own_keys(query: Tensor, mask: Tensor | None) -> bool:
    """Of CUDA's kernels only flash attention lets queries share keys, and it takes neither a mask nor float32. Given a
    copy of the keys for each query, the next one serves; the last, which shares them, would hold all scores."""
    return query.is_cuda and (mask is not None or query.dtype == torch.float32)


class PackedAttention(MegatronModule):
    """Core attention for Megatron's layer spec; `packed_seq_params` is a ModelBatch. window, rope: as of `Layer`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        window: int | None = None,
        rope: str | None = "",
    ) -> None:
        super().__init__(config=config)
        self.window, self.rope = window, rope
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp
        self.scale = config.softmax_scale or softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [t, 1, h, d]; key, value [t, 1, groups, d] -> [t, 1, h * d]. Rotates query and key itself, but not
        those [t, h, d] that an attention by latent vectors gives, whose values [t, h, v] may be narrower."""
        if query.dim() == 4:
            query, key, value = (x.squeeze(1) for x in (query, key, value))
        if self.rope is not None:
            query, key = (rotate(x, *packed_seq_params.cos_sin[self.rope]) for x in (query, key))
        if self.cp_group.size() > 1:
            both = torch.cat([key, value], -1).contiguous()
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
            key, value = both.split([key.size(-1), value.size(-1)], -1)
        width, most = value.size(-1), max(query.size(-1), value.size(-1))  # kernels want one width of all three
        query, key, value = (F.pad(x, (0, most - x.size(-1))) if x.size(-1) < most else x for x in (query, key, value))
        out = packed_attention(query, key, value, packed_seq_params.plan, self.scale, self.window)[..., :width]
        return out.flatten(1).unsqueeze(1)


def transformer_engine_attention() -> type:
    """transformer-engine's attention on the same inputs: it takes `thd` tensors, RoPE has been applied before."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    class PackedTEAttention(TEDotProductAttention):
        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: None,
            attn_mask_type: Any = None,
            attention_bias: None = None,
            packed_seq_params: Any = None,
        ) -> Tensor:
            out = super().forward(
                *(x.squeeze(1) for x in (query, key, value)),
                attention_mask,
                attn_mask_type=attn_mask_type,
                packed_seq_params=packed_seq_params.thd,
            )
            return out.reshape(query.size(0), 1, -1)

    return PackedTEAttention
