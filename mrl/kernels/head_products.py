"""The three products of the loss head: logits, and the gradients of hidden states and of the lm_head weight.

hidden [n, h], weight [V, h]; `rows` is one chunk of the n rows or several, dx [rows, V] the gradient of their logits,
in hidden's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor

from mrl.kernels.fp8 import Recipe

_TILE = 1024  # rows of the matrix


class Operands(Protocol):
    """Products of one pass.

    logits_dtype: float32, or the operands' dtype if the product is rounded to it anyway; waits: True if the gradient
    products cover several chunks at once, where gradients are narrower than logits
    """

    logits_dtype: torch.dtype
    gradient_dtype: torch.dtype
    waits: bool

    def logits(self, rows: slice) -> Tensor:
        """Returns [chunk, V], which the caller may overwrite; the same memory at each call."""

    def d_hidden(self, dx: Tensor) -> Tensor:
        """Returns [chunk, h], from dx of `gradient_dtype`."""

    def add_d_weight(self, total: Tensor | None, dx: Tensor, rows: slice) -> Tensor:
        """Returns float32 [V, h]: the chunk's part, added in place to `total`; a single chunk may already be in
        `gradient_dtype`.
        """


Products = Callable[[Tensor, Tensor], Operands]


def plain_products(hidden: Tensor, weight: Tensor) -> Operands:
    """Returns products in the operands' dtype, or in float32 where this machine multiplies that much faster."""
    is_slow = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and not has_bfloat16()
    return (WidenedProducts if is_slow else PlainProducts)(hidden, weight)


class PlainProducts:
    """Products in the dtype of the operands."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden, self._weight = hidden, weight
        self.logits_dtype = torch.float32 if hidden.is_cuda else hidden.dtype
        self.gradient_dtype = hidden.dtype
        self.waits = hidden.is_cuda
        self._block = _Block(weight, self.logits_dtype)

    def logits(self, rows: slice) -> Tensor:
        hidden = self._hidden[rows]
        if hidden.dtype != self.logits_dtype:
            return wide_product(hidden, self._weight.T)
        return torch.mm(hidden, self._weight.T, out=self._block.of(hidden))

    def d_hidden(self, dx: Tensor) -> Tensor:
        return dx @ self._weight

    def add_d_weight(self, total: Tensor | None, dx: Tensor, rows: slice) -> Tensor:
        hidden = self._hidden[rows]
        is_wide = dx.dtype in (torch.float32, torch.float64)
        if is_wide and total is not None:
            return total.addmm_(dx.T, hidden)
        if is_wide or dx.size(0) == self._hidden.size(0):
            return dx.T @ hidden
        if dx.is_cuda:
            return wide_product(dx.T, hidden) if total is None else add_wide_product(total, dx.T, hidden)
        is_first = total is None
        total = self._weight.new_empty(self._weight.shape, dtype=torch.float32) if total is None else total
        for tile in _tiles(self._weight):
            made = dx[:, tile].T @ hidden
            total[tile].copy_(made) if is_first else total[tile].add_(made)
        return total


class WidenedProducts:
    """float32 products of bfloat16 operands; the weight is converted tile by tile."""

    logits_dtype = gradient_dtype = torch.float32
    waits = False

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden, self._weight = hidden, weight
        self._block = _Block(weight, torch.float32)
        self._tile = weight.new_empty(min(_TILE, weight.size(0)), weight.size(1), dtype=torch.float32)

    def logits(self, rows: slice) -> Tensor:
        hidden = self._hidden[rows].float()
        block = self._block.of(hidden)
        for tile in _tiles(self._weight):
            torch.mm(hidden, self._wide(tile).T, out=block[:, tile])
        return block

    def d_hidden(self, dx: Tensor) -> Tensor:
        made = dx.new_zeros(dx.size(0), self._weight.size(1))
        for tile in _tiles(self._weight):
            made.addmm_(dx[:, tile], self._wide(tile))
        return made

    def add_d_weight(self, total: Tensor | None, dx: Tensor, rows: slice) -> Tensor:
        hidden = self._hidden[rows].float()
        return torch.mm(dx.T, hidden) if total is None else total.addmm_(dx.T, hidden)

    def _wide(self, tile: slice) -> Tensor:
        rows = self._weight[tile]
        return self._tile[: rows.size(0)].copy_(rows)


class _Block:
    """Reused memory for a chunk's logits: fresh memory of this size would be faulted in page by page."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self._like, self._dtype = weight, dtype
        self._room: Tensor | None = None

    def of(self, hidden: Tensor) -> Tensor:
        """Returns [rows of hidden, V]."""
        if self._room is None or self._room.size(0) < hidden.size(0):
            self._room = self._like.new_empty(hidden.size(0), self._like.size(0), dtype=self._dtype)
        return self._room[: hidden.size(0)]


class RoundedProducts:
    """Emulated fp8 products: operands are rounded and multiplied as float32.

    Hidden states and the weight are rounded once for all chunks, the logits' gradient chunk by chunk: with per-tensor
    scaling it has one scale per chunk.
    """

    logits_dtype = torch.float32
    waits = False

    def __init__(self, hidden: Tensor, weight: Tensor, recipe: Recipe) -> None:
        self._hidden, self._weight, self._recipe = hidden, weight, recipe
        self.gradient_dtype = hidden.dtype

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


def _tiles(weight: Tensor) -> Iterator[slice]:
    """Yields slices of the weight's rows: products of a tile stay in the cache until they are converted."""
    for start in range(0, weight.size(0), _TILE):
        yield slice(start, min(start + _TILE, weight.size(0)))


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns float32 a @ b, without rounding to a narrower dtype of a and b first, where torch can (on CUDA)."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def add_wide_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Adds `wide_product` of a and b to float32 `total` in place; where torch can, in the product itself."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16) and hasattr(torch.ops.aten.addmm, "dtype_out"):
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(wide_product(a, b))


@cache
def has_bfloat16() -> bool:
    """Returns True if this processor multiplies bfloat16 natively (AVX-512 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
