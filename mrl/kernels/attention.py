"""Attention of padded sequences.

Short ones in bfloat16 on CPUs have their own gradient, computed in float32: torch's bfloat16 kernel takes four times as
long there, at 128 keys of 32 channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 1 << 14  # keys times channels of a head up to which it is faster


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Returns [s, h, lq, d] from query [s, h, lq, d] and key, value [s, groups, lk, d].

    mask: bool, True where a query attends to a key, broadcast to [s, h, lq, lk]; None: causal.
    """
    is_short = key.size(-2) * key.size(-1) <= SHORT
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and is_short:
        out: Tensor = _WideGradient.apply(query, key, value, mask, scale)
        return out
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=True)


class _WideGradient(torch.autograd.Function):
    """Same output bits as torch's, with a gradient that is rounded once."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        added = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, attn_mask=added, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, sums, added)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        *tensors, sums, added = ctx.saved_tensors
        wide = [x.float() for x in (grad, *tensors)]
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, sums, 0.0, added is None, attn_mask=None if added is None else added.float(), scale=ctx.scale
        )
        query, key, value = (x.to(grad.dtype) for x in made)
        return query, key, value, None, None
