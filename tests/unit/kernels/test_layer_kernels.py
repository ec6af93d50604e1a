"""Gradients of layers' elementwise kernels: float64 by finite differences, bfloat16 against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.kernels import layers
from mrl.kernels.attention import SHORT, attention

ANGLES = torch.arange(9, dtype=torch.float64).view(3, 1, 3)
COS, SIN = ANGLES.cos().repeat(1, 1, 2), torch.cat([-ANGLES.sin(), ANGLES.sin()], -1)  # for 6 of 8 channels
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


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
@pytest.mark.parametrize("keys", [24, SHORT // 16 + 8], ids=["short", "long"])
def test_attention(keys: int, masked: bool) -> None:
    """Attention in bfloat16 against float64, with grouped queries; short inputs give torch's values bit for bit."""
    gen = torch.Generator().manual_seed(5)
    queries = 16 if masked else keys
    shapes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16), (2, 4, queries, 16))
    *exact, grad = (torch.randn(shape, generator=gen).bfloat16().double() for shape in shapes)
    exact = [x.requires_grad_() for x in exact]
    narrow = [x.detach().bfloat16().requires_grad_() for x in exact]
    mask = (torch.rand(2, 1, queries, keys, generator=gen) < 0.7) if masked else None
    settings = {"is_causal": not masked, "scale": 0.3, "enable_gqa": True}
    want = F.scaled_dot_product_attention(*exact, mask, **settings)
    made = attention(*narrow, mask, 0.3)
    assert torch.equal(made, F.scaled_dot_product_attention(*narrow, mask, **settings))
    pairs = zip(torch.autograd.grad(made, narrow, grad.bfloat16()), torch.autograd.grad(want, exact, grad), strict=True)
    for mine, other in pairs:
        assert mine.dtype == torch.bfloat16 and (mine.double() - other).norm() < 2.0**-7 * other.norm()
