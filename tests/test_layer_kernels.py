"""The gradients of layers' elementwise parts: float64 by finite differences, bfloat16 against that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mrl.kernels import layers

ANGLES = torch.arange(9, dtype=torch.float64).view(3, 1, 3)
COS, SIN = ANGLES.cos().repeat(1, 1, 2), torch.cat([-ANGLES.sin(), ANGLES.sin()], -1)  # of 6 of 8 channels
KERNELS: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "swiglu": (layers.swiglu, ((3, 8),)),
    "geglu": (layers.geglu, ((3, 8),)),
    "rotate": (lambda x: layers.rotate(x, COS.to(x.dtype), SIN.to(x.dtype)), ((3, 2, 8),)),
    "rms_norm": (lambda x, w: layers.rms_norm(x, w, 1e-6), ((3, 8), (8,))),
    "wide_rms_norm": (lambda x, w: layers.wide_rms_norm(x, w, 1e-6), ((3, 8), (8,))),
    "shifted_rms_norm": (lambda x, w: layers.shifted_rms_norm(x, w, 1e-6), ((3, 8), (8,))),
}


@pytest.mark.parametrize("name", KERNELS)
def test_gradients(name: str) -> None:
    kernel, shapes = KERNELS[name]
    gen = torch.Generator().manual_seed(3)
    inputs = [torch.randn(shape, generator=gen).bfloat16().double().requires_grad_() for shape in shapes]
    assert torch.autograd.gradcheck(kernel, inputs)
    narrow = [x.detach().bfloat16().requires_grad_() for x in inputs]
    made, want = kernel(*narrow), kernel(*inputs)
    assert made.dtype == torch.bfloat16 and (made.double() - want).norm() < 2.0**-7 * want.norm()
    pairs = zip(torch.autograd.grad(made.sum(), narrow), torch.autograd.grad(want.sum(), inputs), strict=True)
    for mine, exact in pairs:
        assert (mine.double() - exact).norm() < 2.0**-6 * exact.norm()
