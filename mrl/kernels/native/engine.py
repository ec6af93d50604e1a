"""Per-token work of an engine with `decode.c` and `draws.c`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from mrl.kernels import native


class _Decode(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("requests", "heads", "groups", "channels", "value_channels", "window")),
        ("scale", ctypes.c_float),
    ]


def supports_decode_attention(query: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> bool:
    """Returns True if `decode_attention` supports these tensors."""
    usual = native.supports_float32_tensors(query, key, value) and key.is_contiguous() and value.is_contiguous()
    if not usual or slots.dtype != torch.int32 or slots.stride(-1) != 1:
        return False
    fits = query.size(-1) == key.size(-1) and query.size(1) % key.size(1) == 0
    return fits and not (key.size(-1) % native.WIDTH or value.size(-1) % native.WIDTH)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    rows: Tensor,
    lengths: Tensor,
    out: Tensor,
    *,
    window: int | None,
    scale: float,
) -> None:
    """Writes attention of query [requests, heads, d] over the KV cache to out [requests, heads, dv].

    key [slots, groups, d], value [slots, groups, dv]. slots [any, context] int32: each token's slot in the cache, with
    the requests' rows [requests]; lengths [requests]: number of tokens, the current one last. window: keys attended to
    before the current one; None or negative: all. Raises MemoryError.
    """
    problem = _Decode(
        query.size(0), query.size(1), key.size(1), key.size(2), value.size(2), -1 if window is None else window, scale
    )
    made = out if out.is_contiguous() else out.new_empty(out.shape)
    given = (slots, slots.stride(0), rows.long().contiguous(), lengths.long().contiguous())
    native.run("decode_attention", problem, query.contiguous(), key, value, *given, made)
    if made is not out:
        out.copy_(made)


def supports_draw(log_probs: Tensor) -> bool:
    """Returns True if `draw` supports these log-probs [n, vocab]."""
    return native.supports_float32_tensors(log_probs) and log_probs.stride(-1) == 1


def draw(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns sampled tokens [n] int64. log_probs [n, vocab] float32; seeds, positions [n]. Raises MemoryError."""
    tokens = torch.empty(len(log_probs), dtype=torch.int64)
    integers = (seeds.view(torch.int64).contiguous(), positions.long().contiguous())
    native.run("draw", log_probs, log_probs.stride(0), *integers, tokens, *log_probs.shape)
    return tokens
