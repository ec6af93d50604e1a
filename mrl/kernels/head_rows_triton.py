"""Triton kernels of `mrl.kernels.head_rows`: one reads a row of logits once for all its sums, one writes its gradient.

The torch form passes over the logits five and four times. Parameters of kernels have no types except `constexpr`:
triton looks their names up as values.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096  # columns of a row per program


def sums(x: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Implements `RowKernels.sums` of mrl.kernels.head_rows for x [k, V] with contiguous rows, and V > 0."""
    k, words = x.shape
    top = torch.empty(k, dtype=torch.float32, device=x.device)
    made = torch.empty(3, k, dtype=torch.float64, device=x.device)
    if k:
        _sums[(k,)](x, x.stride(0), words, math.log2(math.e) / temperature, top, made, k, columns=_COLUMNS)
    made[1] *= math.log(2)
    return top, made


def gradient(
    x: Tensor,
    top: Tensor,
    shift: Tensor,
    entropy: Tensor,
    temperature: float,
    d_log_probs: Tensor,
    d_entropy: Tensor | None,
    column: Tensor,
    own: Tensor,
    out: Tensor,
) -> Tensor:
    """Implements `RowKernels.gradient` of mrl.kernels.head_rows; shapes as there."""
    k, words = x.shape
    if k:
        _gradient[(k, triton.cdiv(words, _COLUMNS))](
            x, x.stride(0), words, 1 / temperature, top, shift, entropy, d_log_probs.contiguous(),
            d_log_probs if d_entropy is None else d_entropy.contiguous(), column, own, out, out.stride(0),
            has_entropy=d_entropy is not None, columns=_COLUMNS,
        )  # fmt: skip
    return out


@triton.jit
def _sums(x, stride, words, scale, tops, made, rows, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row. The sums are float64: beside the maximum's own 1 the rest keeps its digits."""
    row = tl.program_id(0)
    x += row.to(tl.int64) * stride
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float64)
    weighted = tl.full((), 0.0, tl.float64)
    squares = tl.full((), 0.0, tl.float64)
    for start in range(0, words, columns):
        at = start + tl.arange(0, columns)
        inside = at < words
        logits = tl.load(x + at, mask=inside, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(logits, 0))
        y = (logits - higher) * scale
        e = tl.exp2(y)
        down = tl.where(total > 0, (top - higher) * scale, 0.0)  # rescales sums taken with the previous maximum
        decay = tl.exp2(down)
        weighted = (weighted + down * total) * decay + tl.sum(tl.where(inside, y * e, 0.0).to(tl.float64), 0)
        total = total * decay + tl.sum(e.to(tl.float64), 0)
        squares = squares * decay * decay + tl.sum((e * e).to(tl.float64), 0)
        top = higher
    tl.store(tops + row, top)
    tl.store(made + row, total)
    tl.store(made + rows + row, weighted)
    tl.store(made + 2 * rows + row, squares)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    x,
    stride,
    words,
    per_temperature,
    tops,
    shifts,
    entropies,
    d_log_probs,
    d_entropies,
    labels,
    owns,
    out,
    out_stride,
    has_entropy: tl.constexpr,
    columns: tl.constexpr,
):
    """One program per piece of a row."""
    row = tl.program_id(0)
    at = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = at < words
    logits = tl.load(x + row.to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
    log_p = (logits - tl.load(tops + row)) * per_temperature + tl.load(shifts + row)
    slope = -tl.load(d_log_probs + row)
    p = tl.exp2(log_p * 1.4426950408889634)
    if has_entropy:
        made = p * (slope - tl.load(d_entropies + row) * (log_p + tl.load(entropies + row)))
    else:
        made = p * slope
    made += tl.where(at == tl.load(labels + row), tl.load(owns + row), 0.0)
    tl.store(out + row.to(tl.int64) * out_stride + at, made.to(out.dtype.element_ty), mask=inside)
