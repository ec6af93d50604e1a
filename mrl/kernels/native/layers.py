"""Parts of a transformer layer with `layers.c`: results and gradients equal those of mrl.kernels.layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mrl.kernels import native


def supports(x: Tensor, *others: Tensor, width: int) -> bool:
    """Returns True if the kernels support these tensors; width: channels of a row, or of each half of it."""
    return native.supports_float32_tensors(x, *others) and width % native.WIDTH == 0


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        return gated(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        made = torch.empty_like(x)
        native.call("swiglu_gradient", x, grad.contiguous(), made, *_rows(grad))
        return made


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        out, scale = normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        made, of_weight, room = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        native.call("rms_norm_gradient", x, weight, scale, grad.contiguous(), made, of_weight, room, *_rows(x))
        return made, of_weight, None


def gated(x: Tensor) -> Tensor:
    """Returns silu(gate) * up of contiguous x [..., 2 * n]."""
    out = x.new_empty(*x.shape[:-1], x.size(-1) // 2)
    native.call("swiglu", x, out, *_rows(out))
    return out


def normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (x * scale * weight, scale [...]: 1 / sqrt(mean(x^2) + eps)) of x [..., d]; x and weight are
    contiguous.
    """
    out, scale = torch.empty_like(x), x.new_empty(x.shape[:-1])
    native.call("rms_norm", x, weight, float(eps), out, scale, *_rows(x))
    return out, scale


def rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotates x [t, heads, d] with contiguous heads; cos, sin [t, 1, r]; sign: -1 rotates back."""
    x = native.with_whole_rows(x)
    out = x.new_empty(x.shape)
    cos, sin = cos.contiguous(), sin.contiguous()
    native.call("rotate", x, *x.stride()[:2], cos, sin, float(sign), out, *x.shape, cos.size(-1))
    return out


def _rows(x: Tensor) -> tuple[int, int]:
    """(rows, channels of each)."""
    return x.numel() // max(1, x.size(-1)), x.size(-1)
