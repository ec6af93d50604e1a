"""Scales, and casts to fp8 and back.

The rules are those of transformer-engine's quantisation kernels (common/recipe, common/cast), with one difference: a
NaN taints the scale of everything that shares it, where a kernel's maximum may skip it; the value itself is NaN in
both.
torch's casts round to the nearest, ties to even. Their inputs are clamped to the format's range, since torch's e5m2
overflows to infinity where transformer-engine's saturates.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Inverse = tuple[Tensor, Tensor]  # factors before the cast, and after it

_LARGEST = torch.finfo(torch.float32).max
_EXPONENT = 0x7F800000  # bits of a float32


def tensor_scale(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool = False) -> Inverse:
    """Returns float32 (scale, 1 / scale) of the shape of `amax`; the scale maps `amax` to the largest value of `dtype`.

    power_of_two: rounds the scale down to a power of two. The scale is 1 for an amax of 0, infinity or NaN.
    """
    end = torch.full_like(amax, torch.finfo(dtype).max)  # torch divides a number by a tensor with two roundings
    scale = (end / amax).clamp(max=_LARGEST)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    scale = torch.where(amax.isfinite() & (amax > 0), scale, 1.0)
    return scale, 1 / scale


def block_scale(amax: Tensor, dtype: torch.dtype) -> Inverse:
    """Returns mxfp8's float32 (factor, its inverse) of the shape of `amax`, from e8m0 exponents.

    The inverse is the power of two at or above amax / the format's largest value. A block with an infinity becomes
    zeros and NaN, one with a NaN is NaN.
    """
    bits = (amax * (1 / torch.finfo(dtype).max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    is_up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = (exponent + is_up.int()).clamp(max=0xFE)
    factor = torch.where(exponent == 0, 1.0, ((0xFE - exponent) << 23).view(torch.float32))
    inverse = torch.where(exponent == 0, 2.0**-127, (exponent << 23).view(torch.float32))
    return torch.where(amax.isnan(), torch.nan, factor), inverse


def round_trip(
    x: Tensor, dtype: torch.dtype, scale: Callable[[Tensor], Inverse], block: tuple[int, int] | None = None
) -> Tensor:
    """Returns x [m, k] after a cast to `dtype` and back, float32 [m, k].

    scale: function of the largest magnitudes, [] or [blocks down, 1, blocks across, 1]
    block: rows and columns that share a scale; None: all. Blocks at the edges are smaller.
    """
    x = x.float()
    if block is None:
        factor, inverse = scale(x.abs().amax() if x.numel() else x.new_zeros(()))
        return _cast(x * factor, dtype).mul_(inverse)
    (m, k), (rows, columns) = x.shape, block
    if m % rows or k % columns:
        x = torch.nn.functional.pad(x, (0, -k % columns, 0, -m % rows))
    blocks = x.view(x.size(0) // rows, rows, x.size(1) // columns, columns)
    factor, inverse = scale(blocks.abs().amax((1, 3), keepdim=True))
    return _cast(blocks * factor, dtype).mul_(inverse).view(x.shape)[:m, :k]


def quantized_blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns (e4m3 [m, k], float32 [ceil(m / size), ceil(k / size)] factors that restore the blocks of x)."""
    m, k = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -k % size, 0, -m % size))
    blocks = padded.view(padded.size(0) // size, size, padded.size(1) // size, size)
    factor, inverse = tensor_scale(blocks.abs().amax((1, 3), keepdim=True), E4M3)
    values = _saturated(blocks * factor, E4M3).view(padded.shape)[:m, :k].contiguous()
    return values, inverse[:, 0, :, 0].contiguous()


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts and restores; overwrites x."""
    return _saturated(x, dtype).float()


def _saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp_(-largest, largest).to(dtype)
