"""Faster float32 matrix products on CPUs where torch's default library does not use the widest instructions.

MKL keeps to AVX2 on AMD processors. oneDNN, which torch also ships, uses AVX-512 there and is about twice as fast in
full float32. `aten::mm` is redirected to oneDNN for products that are large enough to repay the call.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mrl.platform.registry import Stage, adaptation

WORTHWHILE = 1 << 20  # multiply-adds; below it MKL's smaller overhead wins
LONG = 4  # ratio of k to max(m, n) from which a product counts as a weight gradient
_libraries: list[torch.library.Library] = []


@cache
def _slow_default() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return (
        not torch.cuda.is_available()
        and torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and cpuinfo.is_file()
        and "AuthenticAMD" in cpuinfo.read_text()
    )


@adaptation(
    "onednn_matmul",
    why="MKL uses AVX2 on AMD processors with AVX-512; oneDNN multiplies float32 matrices twice as fast there",
    stage=Stage.BEFORE_IMPORT,
    needed=_slow_default,
)
def redirect_mm() -> None:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a kernel of its own is being replaced, which is the point
        library.impl("mm", mm, "CPU")
    _libraries.append(library)  # keeps the redirection alive


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Returns a [m, k] @ b [k, n].

    torch's default handles small, non-float32 and oddly strided products, and weight gradients, for which oneDNN would
    first transpose both operands.
    """
    m, k = a.shape
    n = b.shape[1]
    is_gradient = a.stride(1) != 1 and k >= LONG * max(m, n)
    if m * k * n < WORTHWHILE or is_gradient or not (_plain(a) and _plain(b)):
        return torch.mm(a, b, out=a.new_empty(m, n))  # the `out` form is a kernel of its own, still torch's
    if a.stride(1) != 1 and n < m:  # oneDNN is slow when the tall operand is the transposed one: give it the other
        return _linear(b.t(), a).t()
    return _linear(a, b.t())


def _plain(x: Tensor) -> bool:
    """True for a dense float32 matrix or the transpose of one."""
    return x.dtype == torch.float32 and (x.is_contiguous() or x.t().is_contiguous())


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, k] @ weight [n, k].T"""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out
