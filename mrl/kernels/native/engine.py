"""What an engine does for each new token, by `decode.c` and `draws.c`."""

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


def decodes(query: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> bool:
    """Whether `decode_attention` takes these."""
    usual = native.serves_float32(query, key, value) and key.is_contiguous() and value.is_contiguous()
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
    """out [requests, heads, dv]: attention of query [requests, heads, d] over key [slots, groups, d] and value [slots,
    groups, dv]. slots [any, context] int32: of the rows [requests], each token's in the cache; lengths [requests]: how
    many there are, the own one last. window: keys before the own one that are seen; None or negative: all."""
    problem = _Decode(
        query.size(0), query.size(1), key.size(1), key.size(2), value.size(2), -1 if window is None else window, scale
    )
    made = out if out.is_contiguous() else out.new_empty(out.shape)
    given = (slots, slots.stride(0), rows.long().contiguous(), lengths.long().contiguous())
    native.run("decode_attention", problem, query.contiguous(), key, value, *given, made)
    if made is not out:
        out.copy_(made)


def draws(log_probs: Tensor) -> bool:
    """Whether `draw` takes these."""
    return native.serves_float32(log_probs) and log_probs.stride(-1) == 1


def draw(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The tokens drawn, [n] int64. log_probs [n, vocab] float32; seeds, positions [n]."""
    tokens = torch.empty(len(log_probs), dtype=torch.int64)
    integers = (seeds.view(torch.int64).contiguous(), positions.long().contiguous())
    native.run("draw", log_probs, log_probs.stride(0), *integers, tokens, *log_probs.shape)
    return tokens
