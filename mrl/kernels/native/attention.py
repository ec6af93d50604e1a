"""Attention of packed tokens with `attention.c`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrl.kernels import native

LONG = 1 << 18  # keys of a sequence times channels of a head up to which it is 1.5 times as fast as torch's form


@dataclass(frozen=True)
class Segments:
    """Segments of queries and keys, int64 on the CPU: each query attends to its segment's keys up to its own last one.

    query_starts [S + 1]: start of each segment's queries
    queries [n]: tokens, each at most once; results [n]: their rows in the result, each once
    last [n]: index, in the segment, of the query's last key
    key_starts [S + 1], keys [m]: tokens, each at most once in a segment
    longest: largest number of keys in a segment
    """

    query_starts: Tensor
    queries: Tensor
    results: Tensor
    last: Tensor
    key_starts: Tensor
    keys: Tensor
    longest: int


class _Tensor(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("token", ctypes.c_int64), ("head", ctypes.c_int64)]

    @classmethod
    def of(cls, x: Tensor) -> _Tensor:
        """x [tokens, heads, channels] with contiguous channels."""
        return cls(x.data_ptr(), *x.stride()[:2])


class _Problem(ctypes.Structure):
    _OF_SEGMENTS = ("query_starts", "queries", "results", "last", "key_starts", "keys")
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("segments", "heads", "groups", "channels", "longest", "window")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("sinks", *_OF_SEGMENTS)),
    ]

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, sinks: Tensor | None, of: Segments, scale: float, window: int | None
    ) -> _Problem:
        sizes = len(of.key_starts) - 1, query.size(1), key.size(1), query.size(2), of.longest, window or 0
        at = None if sinks is None else sinks.data_ptr()
        return cls(*sizes, scale, at, *(getattr(of, name).data_ptr() for name in cls._OF_SEGMENTS))


def supports(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> bool:
    """Returns True if `NativeAttention` supports these tensors."""
    given = (query, key, value) if sinks is None else (query, key, value, sinks)
    return (
        native.supports_float32_tensors(*given)
        and query.size(-1) == value.size(-1)
        and not query.size(-1) % native.WIDTH
    )


class NativeAttention(torch.autograd.Function):
    """[n, h, d] from query [t, h, d], key and value [tokens, groups, d], sinks [h] or None.

    window: number of keys a query attends to, including its last one; None: all up to that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        of: Segments,
        scale: float,
        window: int | None,
    ) -> Tensor:
        query, key, value = (native.with_whole_rows(x) for x in (query, key, value))
        sinks = None if sinks is None else native.with_whole_rows(sinks)
        out = query.new_empty(len(of.results), *query.shape[1:])
        sums = query.new_empty(2, len(of.queries), query.size(1))
        problem = _Problem.of(query, key, sinks, of, scale, window)
        native.run("attention", problem, *map(_Tensor.of, (query, key, value)), out, *sums)
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        ctx.settings = of, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, sums = ctx.saved_tensors
        grad = native.with_whole_rows(grad)
        made = [x.new_zeros(x.shape) for x in (query, key, value)]
        d_sinks = query.new_zeros(query.size(1))
        problem = _Problem.of(query, key, sinks, *ctx.settings)
        given = map(_Tensor.of, (query, key, value, out, grad))
        native.run("attention_gradient", problem, *given, *sums, *made, d_sinks)
        return *made, None if sinks is None else d_sinks, None, None, None
