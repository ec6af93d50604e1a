"""Means and variances over a mask, whitening, explained variance.

All masks are bool or 0/1 of the values' shape; what the values hold outside the mask (NaN included) has no influence.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-8


def check_same_shape(**tensors: Tensor) -> None:
    """ValueError naming every shape unless all are equal (nothing is ever broadcast by accident)."""
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"shapes differ: {shapes}")


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask, 0-d; 1e-8 in the denominator makes an empty mask give 0."""
    inside = values.masked_fill(~mask.bool(), 0)
    return inside.sum() / (mask.sum().to(values.dtype) + EPS)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Variance over the mask, 0-d, Bessel-corrected; 0 for fewer than two values (verl raises there)."""
    count = mask.sum().to(values.dtype)
    biased = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return torch.where(count > 1, biased * count / (count - 1).clamp(min=1), torch.zeros_like(biased))


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values - mean) * rsqrt(var + 1e-8) over the mask, 0 outside it; the shape of `values`.

    shift_mean False: the mean is added again afterwards, so that only the scale changes (verl, and TRL for rewards).

    The variance is Bessel-corrected like verl's and TRL's; OpenRLHF uses the biased one. The statistics are those of
    the tensor given: pass the whole global batch (TRL's classic trainer whitens each rank's part by itself).
    """
    check_same_shape(values=values, mask=mask)
    outside = ~mask.bool()
    inside = values.masked_fill(outside, 0)
    count = mask.sum().to(values.dtype)
    mean = inside.sum() / (count + EPS)
    centred = inside.sub_(mean).masked_fill_(outside, 0)
    square = torch.linalg.vector_norm(centred, dim=-1).square().sum()  # by rows: one long float32 sum drifts
    var = torch.where(count > 1, square / (count + EPS) * count / (count - 1).clamp(min=1), 0)
    white = centred.mul_(torch.rsqrt(var + EPS))
    return white if shift_mean else white.add_(mean).masked_fill_(outside, 0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - var(returns - values) / var(returns) over the mask, 0-d.

    1: the critic predicts the returns up to a constant; 0: no better than a constant; negative: worse. Returns that do
    not vary give 0, not NaN: there was nothing to explain.
    """
    check_same_shape(values=values, returns=returns, mask=mask)
    total = masked_var(returns, mask)
    left = masked_var(returns - values, mask)
    return torch.where(total > 0, 1 - left / total, torch.zeros_like(total))
