"""`mrl.kernels.head_rows` with `head.c`: rows of logits are read once for all their sums, and once for their
gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import native

_DTYPES = (torch.float32, torch.bfloat16)


def supports(x: Tensor) -> bool:
    """Returns True for logits [k, V] on a CPU with contiguous rows."""
    of_a_kind = x.dtype in _DTYPES and native.supports_tensors(x)
    return of_a_kind and x.stride(1) == 1


def sums(x: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Implements `RowKernels.sums` of mrl.kernels.head_rows; shapes as there."""
    top, made = x.new_empty(x.size(0), dtype=torch.float32), x.new_empty(3, x.size(0), dtype=torch.float64)
    native.call("head_sums", x, _is_narrow(x), _stride(x), 1 / temperature, top, made, *x.shape)
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
    vectors = [vector.float().contiguous() for vector in (top, shift, entropy, d_log_probs)]
    steep = 0 if d_entropy is None else d_entropy.float().contiguous()
    kinds = _is_narrow(x), _is_narrow(out), _stride(x), _stride(out), 1 / temperature
    last = column.contiguous(), own.float().contiguous()
    native.call("head_gradient", x, out, *kinds, *vectors, steep, *last, *x.shape)
    return out


def _is_narrow(x: Tensor) -> int:
    return int(x.dtype == torch.bfloat16)


def _stride(x: Tensor) -> int:
    """Bytes between rows."""
    return x.stride(0) * x.itemsize
