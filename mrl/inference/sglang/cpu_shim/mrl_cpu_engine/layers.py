"""Layers of sglang's models in fewer calls of torch: of a small model's time on a CPU calls are most."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.kernels.native import layers as native


def rotations_in_whole_rows(module: Any) -> None:
    """A rotary embedding exchanges the halves of whole rows at once, and all layers of a forward pass share its
    angles: half of its time. Interleaved channels keep the stock form."""
    layer = module.RotaryEmbedding
    stock = layer.forward_native

    def forward_native(self: Any, positions: Tensor, query: Tensor, key: Tensor, *args: Any, **settings: Any) -> Any:
        asks_more = any(given is not None for given in (*args, *settings.values()))
        if asks_more or not self.is_neox_style or hasattr(self, "sin_cos_cache"):
            return stock(self, positions, query, key, *args, **settings)
        cos, sin = _angles(self, positions.flatten(), query.dtype)
        return _rotated(query, cos, sin, self.head_size), _rotated(key, cos, sin, self.head_size)

    layer.forward_native = forward_native


def norms_in_one_call(module: Any) -> None:
    """RMSNorm, and what it is added to before. What asks for more keeps the stock form."""
    layer = module.RMSNorm
    stock = layer.forward_native

    def forward_native(self: Any, x: Tensor, residual: Tensor | None = None, *args: Any, **settings: Any) -> Any:
        more = (*args, *settings.values(), self.variance_size_override, self.override_orig_dtype)
        asks_more = any(given is not None for given in more)
        others = [self.weight] if residual is None else [self.weight, residual]
        if asks_more or x.size(-1) != self.hidden_size or not native.supports(x, *others, width=x.size(-1)):
            return stock(self, x, residual, *args, **settings)
        x = (x if residual is None else x + residual).contiguous()
        out, _ = native.normed(x, self.weight, self.variance_epsilon)
        return out if residual is None else (out, x)

    layer.forward_native = forward_native


def gates_in_one_call(module: Any) -> None:
    """silu(gate) * up."""
    layer = module.SiluAndMul
    stock = layer.forward_native

    def forward_native(self: Any, x: Tensor) -> Tensor:
        is_taken = native.supports(x, width=x.size(-1) // 2)
        return native.gated(x.contiguous()) if is_taken else stock(self, x)

    layer.forward_native = forward_native


def _angles(layer: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and signed sin, [tokens, 1, rotary channels]: x * cos + exchanged x * sin is x rotated. Kept with the values
    of the positions, whose place in memory is the next forward's, too."""
    kept = layer.__dict__.get("angles")
    if kept is None or kept[1].dtype != dtype or not torch.equal(kept[0], positions):
        cos, sin = layer.cos_sin_cache.index_select(0, positions).to(dtype)[:, None].chunk(2, -1)
        kept = positions.clone(), torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        layer.__dict__["angles"] = kept
    return kept[1], kept[2]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, head_size: int) -> Tensor:
    """x, [tokens, heads * head_size] or as many heads as a dimension: a new tensor of its shape."""
    heads, width = x.view(len(cos), -1, head_size), cos.size(-1)
    if native.supports(heads, cos, sin, width=width):
        return native.rotated(heads, cos, sin, 1).view(x.shape)
    part = heads[..., :width]
    out = (part * cos).addcmul_(part.roll(width // 2, -1), sin)
    return (out if width == head_size else torch.cat([out, heads[..., width:]], -1)).reshape(x.shape)
