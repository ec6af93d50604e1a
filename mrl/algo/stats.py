"""Means and variances over a mask, whitening, explained variance.

All masks are bool or 0/1 of the values' shape; values outside the mask (NaN included) have no influence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.kernels import triton_support
from mrl.kernels.masked import bits, count, keep, row_groups
from mrl.kernels.native import algo as native

EPS = 1e-8


def check_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError naming every shape unless all are equal, which prevents accidental broadcasting."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes differ: {shapes}")


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean over the mask, 0-d, or over `axis` alone; 1e-8 in the denominator makes an empty mask give 0."""
    inside = values.masked_fill(~mask.bool(), 0)
    return inside.sum(axis) / (mask.sum(axis).to(values.dtype) + EPS)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance over the mask, 0-d, Bessel-corrected unless `unbiased` is False; 0 for fewer than two values (verl
    raises there).
    """
    count = mask.sum().to(values.dtype)
    biased = masked_mean((values - masked_mean(values, mask)).square(), mask)
    if not unbiased:
        return biased
    return torch.where(count > 1, biased * count / (count - 1).clamp(min=1), torch.zeros_like(biased))


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values - mean) * rsqrt(var + 1e-8) over the mask, 0 outside it; the shape of `values`.

    shift_mean False: the mean is added again afterwards, so that only the scale changes (verl, and TRL for rewards).

    The variance is Bessel-corrected like verl's and TRL's; OpenRLHF uses the biased one. The statistics are those of
    the tensor given: pass the whole global batch (TRL's classic trainer whitens each rank's part by itself).
    """
    check_same_shape(values=values, mask=mask)
    flat = values.reshape(1, -1) if values.dim() != 2 else values
    mask = mask.bool().view_as(flat)
    out = torch.empty_like(flat)
    for rows in row_groups(flat):
        keep(flat[rows], bits(mask[rows], flat.dtype), out=out[rows])
    return whiten_(out, mask, shift_mean).view_as(values)


def whiten_(inside: Tensor, mask: Tensor, shift_mean: bool = True, moments: Tensor | None = None) -> Tensor:
    """Whitens `inside` [B, T], which is 0 outside the mask, in place; see `whiten`.

    moments [3] float64: the count, sum and sum of squares inside the mask, if known.
    """
    if moments is not None and mask.is_contiguous() and triton_support.supports(inside):
        from mrl.kernels import algo_triton

        algo_triton.whiten_(inside, mask, moments, EPS, shift_mean)
        return inside
    found, total, square = _moments(inside, mask) if moments is None else moments
    mean = (total / (found + EPS)).to(inside.dtype)
    around = square - 2 * mean.double() * total + found * mean.double().square()
    if inside.is_cuda or float(around) < square / 2:  # the difference would have lost digits; a GPU is not waited for
        around = _around(mean, inside, mask)
    var = torch.where(found > 1, around / (found + EPS) * found / (found - 1).clamp(min=1), 0)
    scale = torch.rsqrt(var + EPS).to(inside.dtype)
    if native.supports(inside) and mask.is_contiguous():
        native.whiten_(inside, mask, float(mean), float(scale), 0.0 if shift_mean else float(mean))
        return inside
    for rows in row_groups(inside):
        block = inside[rows].sub_(mean).mul_(scale)
        keep(block if shift_mean else block.add_(mean), bits(mask[rows], inside.dtype), out=block)
    return inside


def _moments(inside: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total, square = torch.zeros(2, dtype=torch.float64, device=inside.device)
    for rows in row_groups(inside):
        flat = inside[rows].view(-1)
        total += flat.sum()
        square += flat.dot(flat)
    return count(mask).double(), total, square


def _around(mean: Tensor, inside: Tensor, mask: Tensor) -> Tensor:
    """Returns the sum of the squared distances from the mean over the mask, 0-d float64."""
    square = torch.zeros((), dtype=torch.float64, device=inside.device)
    for rows in row_groups(inside):
        centred = inside[rows].sub(mean)
        keep(centred, bits(mask[rows], inside.dtype), out=centred)
        square += torch.linalg.vector_norm(centred, dim=-1).double().square().sum()
    return square


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Returns 1 - var(returns - values) / var(returns) over the mask, 0-d.

    1: the critic predicts the returns up to a constant; 0: no better than a constant; negative: worse. Constant returns
    give 0, not NaN.
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    total = masked_var(returns, mask)
    left = masked_var(returns - values, mask)
    return torch.where(total > 0, 1 - left / total, torch.zeros_like(total))


def correlation(a: Tensor, b: Tensor) -> float:
    """Returns Pearson's correlation of two vectors [n]; 0 if one of them is constant."""
    check_same_shape(a=a, b=b)
    x, y = (v.double() - v.double().mean() for v in (a, b))
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale > 0 else 0.0
