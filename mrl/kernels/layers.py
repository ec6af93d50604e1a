"""Elementwise parts of a transformer layer with hand-written gradients: in plain torch, and some in C for CPUs.

Each computes the composed form with fewer passes over memory: halves are not concatenated, and values that are cheap to
recompute are not kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.kernels.native import layers as native

SHARPNESS, LIMIT = 1.702, 7.0  # constants of the clamped activation


def swiglu(x: Tensor) -> Tensor:
    """Returns silu(gate) * up of x [..., 2 * n] = (gate, up) -> [..., n]."""
    form = native.SwiGLU if native.supports(x, width=x.size(-1) // 2) else _SwiGLU
    out: Tensor = form.apply(x)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding to the first r <= d channels of x [t, heads, d]: rotates (x[i], x[i + r / 2]).

    cos, sin [t, 1, r] in the dtype of x, without gradients, as from `RotaryAngles.cos_sin`.
    """
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out


def geglu(x: Tensor) -> Tensor:
    """Returns gelu_tanh(gate) * up of x [..., 2 * n] = (gate, up) -> [..., n]."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def clamped_swiglu(x: Tensor) -> Tensor:
    """Returns gate * sigmoid(SHARPNESS * gate) * (up + 1) of x [..., 2 * n] = (gate, up) -> [..., n].

    gate is clamped to at most LIMIT and up to +-LIMIT, as in gpt-oss (transformers' GptOssExperts).
    """
    out: Tensor = _ClampedSwiGLU.apply(x)
    return out


def shifted_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) over the last dimension times (1 + weight), all in float32, rounded to the
    dtype of x.

    x [..., d], weight [d]; the result has the shape and dtype of x. As in Gemma (transformers' Gemma3RMSNorm).
    """
    return wide_rms_norm(x, 1 + _wide(weight), eps)


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) over the last dimension times weight, all in float32, rounded to the dtype of
    x.

    x [..., d], weight [d]; the result has the shape and dtype of x. As in OLMo (transformers' Olmo2RMSNorm).
    """
    return rms_norm(_wide(x), _wide(weight), eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) over the last dimension in float32, rounded to the dtype of x, then times
    weight.

    x [..., d], weight [d]; the result has the shape and dtype of x.
    """
    form = native.RMSNorm if native.supports(x, weight, width=x.size(-1)) else _RMSNorm
    out: Tensor = form.apply(x, weight, eps)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        ctx.save_for_backward(x)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        out = torch.empty_like(x)
        d_gate, d_up = out.chunk(2, -1)
        torch.mul(torch.nn.functional.silu(gate), grad, out=d_up)
        torch.mul(grad, up, out=d_gate)
        torch.ops.aten.silu_backward.grad_input(d_gate, gate, grad_input=d_gate)
        return out


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up, sigmoid = _clamped(x)
        return sigmoid.mul_(gate).mul_(up + 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up, sigmoid = _clamped(x)
        slope = (1 - sigmoid).mul_(gate).mul_(SHARPNESS).add_(1).mul_(sigmoid)  # of gate * sigmoid
        out = torch.cat([slope.mul_(up + 1).mul_(grad), sigmoid.mul_(gate).mul_(grad)], -1)
        one, other = x.chunk(2, -1)
        return out.mul_(torch.cat([one <= LIMIT, other.abs() <= LIMIT], -1))


def _clamped(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up, sigmoid(SHARPNESS * gate)."""
    gate, up = x.chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate, up, (SHARPNESS * gate).sigmoid_()


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotates in passes over whole rows, several times as fast on a CPU as four passes over halves of a head."""
    width = cos.size(-1)
    if native.supports(x, cos, sin, width=width):
        return native.rotated(x, cos, sin, sign)
    part = x[..., :width]
    exchanged = torch.cat([part[..., width // 2 :], part[..., : width // 2]], -1)
    out = (part * cos).addcmul_(exchanged, sin, value=sign)
    return out if width == x.size(-1) else torch.cat([out, x[..., width:]], -1)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = _wide(x) * scale
        d_weight = (grad * normed.to(x.dtype)).flatten(0, -2).sum(0)
        d_normed = _wide(grad * weight)
        along = (d_normed * normed).mean(-1, keepdim=True)
        return torch.addcmul(d_normed, normed, along, value=-1).mul_(scale).to(x.dtype), d_weight, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
