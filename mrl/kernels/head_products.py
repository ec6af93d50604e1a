"""The three products of the loss head: logits, and the gradients of hidden states and of the vocabulary's matrix.

hidden [n, h], weight [V, h]; `rows` is a chunk of the n, dx [chunk, V] the gradient of its logits, in hidden's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from mrl.kernels.fp8 import Recipe


class Operands(Protocol):
    def logits(self, rows: slice) -> Tensor:
        """float32 [chunk, V], which the caller may overwrite."""

    def d_hidden(self, dx: Tensor) -> Tensor:
        """[chunk, h]."""

    def add_d_weight(self, total: Tensor | None, dx: Tensor, rows: slice) -> Tensor:
        """float32 [V, h]: the chunk's part, added to those before it, in place."""


Products = Callable[[Tensor, Tensor], Operands]


class Plain:
    """In the dtype of the operands."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden, self._weight = hidden, weight

    def logits(self, rows: slice) -> Tensor:
        return _wide_product(self._hidden[rows], self._weight.T)

    def d_hidden(self, dx: Tensor) -> Tensor:
        return dx @ self._weight

    def add_d_weight(self, total: Tensor | None, dx: Tensor, rows: slice) -> Tensor:
        hidden = self._hidden[rows]
        if total is not None and dx.dtype == torch.float32:
            return total.addmm_(dx.T, hidden)
        made = _wide_product(dx.T, hidden)
        return made if total is None else total.add_(made)


class Rounded:
    """In fp8, emulated: operands are rounded and multiplied as float32. Hidden states and the matrix are rounded once
    for all chunks, the gradient of the logits chunk by chunk: with one scale a tensor it has one a chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, recipe: Recipe) -> None:
        self._hidden, self._weight, self._recipe = hidden, weight, recipe

    def logits(self, rows: slice) -> Tensor:
        hidden, weight = self._for_logits
        return hidden[rows] @ weight.T

    def d_hidden(self, dx: Tensor) -> Tensor:
        weight, _ = self._for_gradients
        return (self._recipe.rounded(dx, "gradient", 1) @ weight).to(dx.dtype)

    def add_d_weight(self, total: Tensor | None, dx: Tensor, rows: slice) -> Tensor:
        grad, hidden = dx, self._hidden
        if self._recipe.wgrad:
            grad, (_, hidden) = self._recipe.rounded(dx, "gradient", 0), self._for_gradients
        made = grad.float().T @ hidden[rows].float()
        return made if total is None else total.add_(made)

    @cached_property
    def _for_logits(self) -> tuple[Tensor, Tensor]:
        return self._recipe.rounded(self._hidden, "input", 1), self._recipe.rounded(self._weight, "weight", 1)

    @cached_property
    def _for_gradients(self) -> tuple[Tensor, Tensor]:
        return self._recipe.rounded(self._weight, "weight", 0), self._recipe.rounded(self._hidden, "input", 0)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """float32 a @ b; without rounding it to a narrower dtype of a and b first, where torch can (on CUDA)."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()
