"""Products and functions on CPUs whose rows have the same bits however many there are.

* MKL adds up the terms of a float32 product in another order in the last rows that are fewer than 4: of a small
  product, of one thread's share, or of a product with one column (measured for 1 to 3,000 rows, 1 to 4,864 columns and
  1 to 3 threads). With rows padded to a multiple of 4 all have the same order. Products of a batch of matrices get as
  many rows as keep them out of torch's own form for small ones. Products whose second factor is a vector, or has more
  dimensions than the first, keep the stock form.
* torch computes what fills no vector at the end of a tensor with other forms of exp, sin and the like.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ROWS = 4
SMALL = 400  # multiplications: torch itself computes smaller products of a batch
_STOCK = functional.linear
VECTORS = 64  # numbers; torch's loops take two vectors of at most 16 at once


def in_four_rows(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `product`(x, y, ...) with the rows of x padded to a multiple of 4."""

    @wraps(product)
    def run(x: Tensor, y: Tensor, *more: Any, out: Tensor | None = None, **settings: Any) -> Tensor:
        is_batched = y.dim() > 2 and x.dim() > 2
        rows = x.size(-2) if is_batched else x.numel() // max(1, x.size(-1))
        least = -(-SMALL // max(1, y.size(-2) * y.size(-1))) if is_batched else 0
        missing = -(-max(rows, least) // ROWS) * ROWS - rows
        if not rows * missing or y.dim() < 2 or y.dim() > max(2, x.dim()) or x.device.type != "cpu":
            return product(x, y, *more, **settings) if out is None else product(x, y, *more, out=out, **settings)
        flat = x if is_batched else x.reshape(rows, x.size(-1))
        made = product(functional.pad(flat, (0, 0, 0, missing)), y, *more, **settings)
        made = made[..., :rows, :] if is_batched else made[:rows].view(*x.shape[:-1], made.size(-1))
        return made if out is None else out.copy_(made)

    return run


def in_whole_vectors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `function`(x, ...), of each number alone, with x padded to a multiple of vectors."""

    @wraps(function)
    def run(x: Tensor, *more: Any, **settings: Any) -> Tensor:
        if x.device.type != "cpu" or settings.get("inplace") or "out" in settings:
            return function(x, *more, **settings)
        missing = -x.numel() % VECTORS
        if not missing and x.is_contiguous():
            return function(x, *more, **settings)
        made = function(functional.pad(x.reshape(-1), (0, missing)), *more, **settings)
        return made[: x.numel()].view(x.shape)

    return run


INVARIANT_MM = in_four_rows(torch.mm)


def add_product(out: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Tensor.addmm_, which SGLang's adapters use, as a product of whole rows and a sum."""
    made = INVARIANT_MM(x, y).mul_(alpha)
    return out.mul_(beta).add_(made) if beta else out.copy_(made)


PRODUCTS: list[tuple[Any, str]] = [(functional, "linear"), (torch, "mm"), (torch, "matmul"), (torch, "bmm")]
PRODUCTS += [(Tensor, name) for name in ("mm", "matmul", "bmm", "__matmul__")]
FUNCTIONS: list[tuple[Any, str]] = [(functional, "silu"), (functional, "gelu")]
FUNCTIONS += [(owner, name) for owner in (torch, Tensor) for name in ("sigmoid", "tanh", "exp", "cos", "sin")]
INVARIANT: dict[Any, Callable[..., Tensor]] = {
    **{product: in_four_rows(product) for product in (getattr(owner, name) for owner, name in PRODUCTS)},
    **{function: in_whole_vectors(function) for function in (getattr(owner, name) for owner, name in FUNCTIONS)},
    Tensor.addmm_: add_product,
}


def install(module: Any = None) -> None:
    """Replaces them in this process, an engine's. module: ignored; the one whose import begins an engine."""
    for owner, name in (*PRODUCTS, *FUNCTIONS, (Tensor, "addmm_")):
        setattr(owner, name, INVARIANT[getattr(owner, name)])


def invariant() -> AbstractContextManager[Any]:
    """Returns a context in which this thread calls them, if they are not installed."""
    return BatchInvariance() if functional.linear is _STOCK else nullcontext()


class BatchInvariance(TorchFunctionMode):
    """A context in which this thread calls them, slower than `install`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return INVARIANT.get(func, func)(*args, **kwargs or {})
