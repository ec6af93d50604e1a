"""Which modules a layer is made of: transformer-engine's, or Megatron's own with our attention and norm."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor

from mrl.families import ModelArch
from mrl.kernels.layers import swiglu
from mrl.models.attention import PackedAttention, transformer_engine_attention
from mrl.models.mcore import (
    MegatronModule,
    ModuleSpec,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from mrl.models.norm import RMSNorm

# where checkpoints keep the norm before the MLP, whatever the layers: the local spec of megatron-core says so
MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def block_spec(arch: ModelArch, config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this rank's chunk `vp_stage`, and the final norm. Call inside the mesh."""
    fused = config.transformer_impl == "transformer_engine"
    layer_spec, norm = (_transformer_engine_layer, _transformer_engine_norm()) if fused else (_local_layer, RMSNorm)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = arch.layers[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    made = {experts: layer_spec(config, experts) for experts in {layer.experts for layer in layers}}
    return TransformerBlockSubmodules(layer_specs=[made[layer.experts] for layer in layers], layer_norm=norm)


class InPlaceGradients(TransformerLayer):
    """transformer-engine's products add to weight gradients in place. The model's own configuration does not say so:
    Megatron's output layer, which goes by it too, would ask for apex' kernel."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        config = copy(config)
        config.gradient_accumulation_fusion = True
        super().__init__(config, *args, **kwargs)


class SwiGLU(MegatronModule):
    """The gated activation in one piece; Megatron's place for it is called use_te_activation_func."""

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x)


def _local_layer(config: TransformerConfig, experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    mlp = layer.submodules.mlp.submodules
    (mlp.experts.submodules if experts else mlp).activation_func = SwiGLU
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


def _transformer_engine_layer(config: TransformerConfig, experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    layer.module = InPlaceGradients
    layer.submodules.self_attention.submodules.core_attention = transformer_engine_attention()
    if experts:  # whose norm is a module of its own: stored as the local layers' is
        layer.submodules.sharded_state_dict_keys_map |= MLP_NORM
    return layer


def _transformer_engine_norm() -> type:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
