"""Causal attention over packed sequences: grouped queries, context parallelism, no loop over sequences.

In plain torch, sequences of similar length share a bucket: they are gathered into one padded batch, and each bucket is
one call of scaled dot product attention (see `AttentionPlan`). In float32 on a CPU a kernel reads them in place.

Context parallelism: rank r holds chunks r and 2 * cp - 1 - r of every sequence. Keys and values are all-gathered
(their gradients reduce-scattered); each chunk of queries attends to the keys up to its own end, so no rank computes
scores that the mask would drop except in its diagonal chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mrl import platform
from mrl.families.table import SINK_CHANNELS
from mrl.kernels.attention import attention
from mrl.kernels.layers import rotate
from mrl.kernels.native import attention as native
from mrl.models.attention_plan import AttentionPlan, Bucket
from mrl.models.mcore import (
    MegatronModule,
    ProcessGroupCollection,
    TransformerConfig,
    ensure_metadata_has_dp_cp_group,
    gather_from_sequence_parallel_region,
    make_sharded_tensors_for_checkpoint,
    set_tensor_model_parallel_attributes,
)


class _Spread(torch.autograd.Function):
    """x[index] without gradients for padding slots: the backward pass gathers by `slot` instead of a scatter-add.

    where: the rows of x that these slots belong to, copied into zeros; None: all. begin: with several slots a row, the
    sum of each row's slots from its `begin` to the next one's.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, slot: Tensor, where: Tensor | None = None, begin: Tensor | None = None
    ) -> Tensor:
        ctx.save_for_backward(slot, where, begin)
        ctx.size = x.size(0)
        return x.contiguous().index_select(0, index)  # rows that are not in one piece take three times as long

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        slot, where, begin = ctx.saved_tensors
        if begin is None:
            own = grad.index_select(0, slot)
        else:
            own = F.embedding_bag(slot, grad.flatten(1), begin, mode="sum").unflatten(1, grad.shape[1:])
        if where is not None:
            own = grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, where, own)
        return own, None, None, None, None


class _Collect(torch.autograd.Function):
    """x[slot], with distinct slots: the backward pass is a copy into zeros."""

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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns the attention outputs [n, h, d] that the plan selects.

    query [t, h, d]; key, value [all ranks' tokens, groups, d]. sinks [h]: each head's score of one extra key with value
    0.
    """
    if native.supports(query, key, value, sinks) and plan.segments.longest * query.size(-1) <= native.LONG:
        out: Tensor = native.NativeAttention.apply(query, key, value, sinks, plan.segments, scale, window)
        return out
    all_in_place = plan.in_place and plan.query_tokens is None
    q = query if all_in_place else _Spread.apply(query, plan.query_index, plan.query_slot, plan.query_tokens)
    if plan.in_place:
        k, v = key, value
    elif plan.key_slot is not None:
        k, v = (_Spread.apply(x, plan.key_index, plan.key_slot, None, plan.key_begin) for x in (key, value))
    else:
        k, v = key.index_select(0, plan.key_index), value.index_select(0, plan.key_index)
    buckets: Sequence[Bucket] = plan.within(window, sink=sinks is not None)
    q_parts = q.split([math.prod(b.size) for b in buckets])
    k_parts, v_parts = (x.split([math.prod(b.keys) for b in buckets]) for x in (k, v))
    parts = zip(buckets, q_parts, k_parts, v_parts, strict=True)
    outputs = [_bucket_attention(bucket, qb, kb, vb, scale, sinks) for bucket, qb, kb, vb in parts]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined if plan.result_slot is None else _Collect.apply(joined, plan.result_slot)


def _bucket_attention(
    bucket: Bucket, query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None
) -> Tensor:
    """query [s * lq, h, d]; key, value [s * lk, groups, d] -> [s * lq, h, d]."""
    q = query.unflatten(0, bucket.size).transpose(1, 2)
    k, v = (x.unflatten(0, bucket.keys).transpose(1, 2) for x in (key, value))
    width = q.size(-1)
    if sinks is not None:
        q, k, v = _with_sinks(q, k, v, sinks / scale)
    if _needs_own_keys(q, bucket.mask):
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
    out = attention(q, k, v, bucket.mask, scale)
    return out[..., :width].transpose(1, 2).flatten(0, 1)


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a first key with value 0, and channels: query, key, value [s, h or groups, l, d] -> [..., d + 8].

    In one added channel the new key has 1, queries have `sinks` [h] and other keys 0.
    """
    s, groups, _, width = key.shape
    column = sinks.to(query.dtype)[:, None, None].expand(s, -1, query.size(2), 1)
    sink = F.pad(key.new_ones(s, groups, 1, 1), (width, SINK_CHANNELS - 1))
    query = F.pad(torch.cat([query, column], -1), (0, SINK_CHANNELS - 1))
    key = torch.cat([sink, F.pad(key, (0, SINK_CHANNELS))], 2)
    return query, key, F.pad(value, (0, SINK_CHANNELS, 1, 0))


def _needs_own_keys(query: Tensor, mask: Tensor | None) -> bool:
    """Returns True if a CUDA kernel needs the keys repeated for each query head.

    Only flash attention lets queries share keys, and it takes neither a mask nor float32. With repeated keys the next
    kernel serves; the last one, which shares keys, would store all scores.
    """
    return query.is_cuda and (mask is not None or query.dtype == torch.float32)


class PackedAttention(MegatronModule):
    """Core attention for Megatron's layer spec; `packed_seq_params` is a ModelBatch.

    window, rope: as in `Layer`; sinks: learns an attention sink score per head;
    is_last: returns only the tokens whose output is needed, if the others can be dropped
    """

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
        sinks: bool = False,
        is_last: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.window, self.rope, self.is_last = window, rope, is_last
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group, self.tp_group = groups.cp, groups.tp
        self.softmax_offset = self._sinks() if sinks else None
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
        """Returns [t, 1, h * d], or n tokens if the others are dropped. query [t, 1, h, d]; key, value [t, 1, groups,
        d].

        Rotates query and key itself, except those [t, h, d] of latent attention, whose values [t, h, v] may be
        narrower.
        """
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
        plan = packed_seq_params.last_layer_plan if self.is_last else packed_seq_params.plan
        out = packed_attention(query, key, value, plan, self.scale, self.window, self.softmax_offset)
        return out[..., :width].flatten(1).unsqueeze(1)

    def _sinks(self) -> nn.Parameter:
        """Sink scores of this rank's heads, initially 0."""
        heads = self.config.num_attention_heads // self.tp_group.size()
        sinks = nn.Parameter(torch.zeros(heads, dtype=self.config.params_dtype, device=platform.device()))
        set_tensor_model_parallel_attributes(sinks, True, 0, 1)
        return sinks

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Shards the sinks; Megatron assumes that weights of foreign modules are equal on all ranks."""
        own = self.state_dict(prefix="", keep_vars=True)
        replicas = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=replicas
        )
        return found


def transformer_engine_attention() -> type:
    """Returns transformer-engine's attention for the same inputs: it takes `thd` tensors, after RoPE."""
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
            inputs, shared = [x.squeeze(1) for x in (query, key, value)], packed_seq_params.shared
            if shared is not None:
                slots = (shared.first, None), (shared.slot, shared.begin), (shared.slot, shared.begin)
                pairs = zip(inputs, slots, strict=True)
                inputs = [_Spread.apply(x, shared.index, slot, None, begin) for x, (slot, begin) in pairs]
            out = super().forward(
                *inputs, attention_mask, attn_mask_type=attn_mask_type, packed_seq_params=packed_seq_params.thd
            )
            if shared is not None:
                out = _Collect.apply(out, shared.first)
            return out.reshape(query.size(0), 1, -1)

    return PackedTEAttention
