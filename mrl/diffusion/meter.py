"""Cost of a computation, measured on tensors without memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Cost:
    """Cost of a computation. flops: of matrix products, attention and convolutions; peak: bytes beside those present
    before"""

    flops: float
    peak: int


def cost_of(compute: Callable[[], object]) -> Cost:
    """Returns the cost of a function of `meta` tensors. Attention counts as a fused kernel, which stores no scores."""
    counter, meter = FlopCounterMode(display=False), _Meter()
    with fused_attention(), counter, meter:
        compute()
    return Cost(counter.get_total_flops(), meter.peak)


class _Meter(TorchDispatchMode):
    """Tracks the memory of operations' results while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._live, self.peak = 0, 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        given = {id(each.untyped_storage()) for each in tree_leaves((arguments, settings)) if isinstance(each, Tensor)}
        made = function(*arguments, **(settings or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if id(storage) not in given and storage not in self._seen:
                    self._take(storage)
        return made

    def _take(self, storage: Any) -> None:
        nbytes = storage.nbytes()
        self._seen.add(storage)
        self._live += nbytes
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._give, nbytes)

    def _give(self, nbytes: int) -> None:
        self._live -= nbytes


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Makes torch's attention the fused kernel, which torch would not choose on `meta`."""
    kept = functional.scaled_dot_product_attention

    def fused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **how: Any) -> Any:
        if attn_mask is not None:
            return kept(query, key, value, attn_mask, **how)
        scale, causal = how.get("scale"), how.get("is_causal", False)
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[0]

    functional.scaled_dot_product_attention = fused  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = kept
