"""Attention of short sequences by `attention.c`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrl.kernels import native


class _Tensor(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("sequence", "head", "token")]

    @classmethod
    def of(cls, x: Tensor) -> _Tensor:
        """x [sequences, heads, tokens, channels], whose channels are in one piece."""
        return cls(x.data_ptr(), *x.stride()[:3])


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "groups", "queries", "keys", "channels")),
        ("scale", ctypes.c_float),
        ("mask", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("mask_sequence", "mask_query")),
    ]

    @classmethod
    def of(cls, query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> _Problem:
        sequences, heads, queries, channels = query.shape
        sizes = sequences, heads, key.size(1), queries, key.size(2), channels
        if mask is None:
            return cls(*sizes, scale, None, 0, 0)
        mask = mask.expand(sequences, 1, queries, -1)
        return cls(*sizes, scale, mask.data_ptr(), mask.stride(0), mask.stride(2))


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """`attention` of mrl.kernels.attention, which says what these are."""
    if not native.serves_float32(query, key, value) or query.size(-1) % native.WIDTH or query.numel() == 0:
        return False
    if mask is None:
        return key.size(2) == query.size(2)
    return mask.dtype == torch.bool and mask.shape[1::2] == (1, key.size(2))


class NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        query, key, value = (native.with_whole_rows(x) for x in (query, key, value))
        mask = None if mask is None else native.with_whole_rows(mask)
        sequences, heads, queries, channels = query.shape
        out = query.new_empty(sequences, queries, heads, channels).transpose(1, 2)
        sums = query.new_empty(2, sequences, heads, queries)
        native.run("attention", _Problem.of(query, key, mask, scale), *map(_Tensor.of, (query, key, value)), out, *sums)
        ctx.save_for_backward(query, key, value, out, sums, mask)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums, mask = ctx.saved_tensors
        grad = native.with_whole_rows(grad)
        made = [x.new_empty(x.transpose(1, 2).shape) for x in (query, key, value)]
        given = map(_Tensor.of, (query, key, value, out, grad))
        native.run("attention_gradient", _Problem.of(query, key, mask, ctx.scale), *given, *sums, *made)
        d_query, d_key, d_value = (x.transpose(1, 2) for x in made)
        return d_query, d_key, d_value, None, None
