"""Linear layer whose three products take operands rounded to fp8; sums are float32, as in tensor cores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.kernels.fp8.recipe import Recipe, Scales


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, scales: Scales | None = None) -> Tensor:
    """Returns x @ weight.T + bias, with fp8 products in forward and backward as in the recipe.

    x [..., k], weight [n, k], bias [n] -> [..., n] in the dtype of x. The backward pass rounds its operands again
    instead of keeping rounded copies.
    """
    out: Tensor = _FP8Linear.apply(x.reshape(-1, x.size(-1)), weight, bias, recipe, scales)
    return out.view(*x.shape[:-1], weight.size(0))


class _FP8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, scales: Scales | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.scales, ctx.bias = recipe, scales, None if bias is None else bias.dtype
        product = recipe.rounded(x, "input", 1, scales) @ recipe.rounded(weight, "weight", 1, scales).T
        return (product if bias is None else product.add_(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        recipe, scales = ctx.recipe, ctx.scales
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        d_x = d_weight = d_bias = None
        across = recipe.rounded(grad, "gradient", 1, scales) if needs_x or not recipe.has_blocks else None
        if needs_x and across is not None:
            d_x = (across @ recipe.rounded(weight, "weight", 0, scales)).to(x.dtype)
        if needs_weight and recipe.wgrad:
            down = recipe.rounded(grad, "gradient", 0, scales) if recipe.has_blocks or across is None else across
            d_weight = (down.T @ recipe.rounded(x, "input", 0, scales)).to(weight.dtype)
        elif needs_weight:
            d_weight = (grad.T @ x.to(grad.dtype)).to(weight.dtype)
        if needs_bias:
            d_bias = grad.float().sum(0).to(ctx.bias)
        return d_x, d_weight, d_bias, None, None
