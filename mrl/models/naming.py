"""Global parameter names in the whole model: the same for every layout and for both kinds of layer spec."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+(?=\.)")
_GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_FUSED_NORMS = {  # transformer-engine names a norm after the linear layer that it is fused with
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}


def unwrap(chunk: nn.Module) -> nn.Module:
    """Returns the model inside Megatron's data-parallel wrapper."""
    inner: Any = chunk
    while isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module
    return inner


def global_name(chunk: nn.Module, name: str) -> str:
    """Maps `name` in this rank's chunk to its name in the whole model, with the local spec's names.

    Layers and experts are counted over all ranks, from 0.
    """
    model: Any = unwrap(chunk)
    for fused, plain in _FUSED_NORMS.items():
        if name.endswith(fused):
            name = name.removesuffix(fused) + plain
    name = _GROUPED.sub(r".mlp.experts.local_experts.\2.\1.weight", name)
    name = _LAYER.sub(lambda m: str(model.decoder.layers[int(m[0])].layer_number - 1), name)
    return _EXPERT.sub(lambda m: str(int(m[0]) + _first_expert(model)), name)


def _first_expert(model: Any) -> int:
    config = model.config
    return model.pg_collection.ep.rank() * (config.num_moe_experts // config.expert_model_parallel_size)
