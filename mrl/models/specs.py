"""Which modules a layer is made of: transformer-engine's, or Megatron's own with our attention and norm."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import Tensor

from mrl.families import ModelArch
from mrl.kernels.layers import swiglu
from mrl.models.attention import PackedAttention, transformer_engine_attention
from mrl.models.fp8_layers import RoundedColumnParallel, RoundedRowParallel
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
from mrl.models.precision import Emulation

# where checkpoints keep the norm before the MLP, whatever the layers: the local spec of megatron-core says so
MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def block_spec(
    arch: ModelArch, config: TransformerConfig, vp_stage: int | None, emulation: Emulation | None = None
) -> TransformerBlockSubmodules:
    """The layers of this rank's chunk `vp_stage`, and the final norm. emulation: what local layers round by. Call
    inside the mesh."""
    fused = config.transformer_impl == "transformer_engine"
    layer_spec, norm = (_transformer_engine_layer, _transformer_engine_norm()) if fused else (_local_layer, RMSNorm)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    kinds = [(arch.layers[i].experts, emulation is not None and emulation.rounds(i, arch.num_layers)) for i in here]
    made = {kind: layer_spec(config, kind[0]) for kind in set(kinds)}
    if emulation is not None:
        for experts, is_rounded in made:
            if is_rounded:
                _round(made[experts, is_rounded], experts, emulation)
    return TransformerBlockSubmodules(layer_specs=[made[kind] for kind in kinds], layer_norm=norm)


def _round(layer: ModuleSpec, experts: bool, emulation: Emulation) -> None:
    """Local layers' four products, and those of each expert, in fp8."""
    column, row = (
        ModuleSpec(module=module, params={"emulation": emulation})
        for module in (RoundedColumnParallel, RoundedRowParallel)
    )
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    attention.linear_qkv, attention.linear_proj = column, row
    own = mlp.experts.submodules if experts else mlp
    own.linear_fc1, own.linear_fc2 = column, row


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
