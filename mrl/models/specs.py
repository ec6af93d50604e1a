"""Layer specs: transformer-engine's modules, or Megatron's own with mrl's attention and norm."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from mrl import platform
from mrl.families import FAMILIES, Decoder, LayerArch, ModelArch
from mrl.kernels.layers import clamped_swiglu, geglu, swiglu
from mrl.models.attention import PackedAttention, transformer_engine_attention
from mrl.models.batch import ModelBatch
from mrl.models.expert_bias import BiasedExpertRow
from mrl.models.fp8_layers import RoundedColumnParallel, RoundedRowParallel
from mrl.models.latent_attention import LatentAttention
from mrl.models.mcore import (
    IdentityOp,
    MegatronModule,
    ModuleSpec,
    SelfAttention,
    TopKRouter,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_num_layers_to_build,
    get_transformer_layer_offset,
)
from mrl.models.norm import AllHeadsNorm, NormThenAdd, RMSNorm, ShiftedRMSNorm, WideRMSNorm
from mrl.models.precision import FP8Emulation

# checkpoint name of the norm before the MLP for both kinds of layers, as in megatron-core's local spec
MLP_NORM = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


def block_spec(
    arch: ModelArch, config: TransformerConfig, vp_stage: int | None, emulation: FP8Emulation | None = None
) -> TransformerBlockSubmodules:
    """Returns the layers of this rank's chunk `vp_stage`, and the final norm.

    emulation: fp8 rounding of local layers. Call inside the mesh.
    """
    fused = config.transformer_impl == "transformer_engine"
    layer_spec = _transformer_engine_layer if fused else partial(_local_layer, FAMILIES[arch.family])
    norm = _transformer_engine_norm() if fused else _local_norm(FAMILIES[arch.family])
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    kinds = [(arch.layers[i], emulation is not None and emulation.rounds(i, arch.num_layers)) for i in here]
    made = {(layer, is_rounded): layer_spec(config, layer) for layer, is_rounded in set(kinds)}
    if emulation is not None:
        for (layer, is_rounded), spec in made.items():
            if is_rounded:
                _round(spec, layer.experts, emulation)
    layers = [made[kind] for kind in kinds]
    if not fused and arch.num_layers - 1 in here and _can_leave_tokens(arch, config, rounded=kinds[-1][1]):
        layers[-1] = _leaving(layer_spec(config, arch.layers[-1]))
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _can_leave_tokens(arch: ModelArch, config: TransformerConfig, *, rounded: bool) -> bool:
    """Returns True if unneeded tokens can be dropped in the last layer, after its keys.

    Not with sequence parallelism, with experts or scales over all tokens, with gates of all tokens, or with deep image
    features added after it.
    """
    deep, last = 0 if arch.vision is None else len(arch.vision.deep), arch.layers[-1]
    gated = last.delta or config.attention_output_gate
    return not (config.sequence_parallel or rounded or last.experts or gated or deep == arch.num_layers)


def _leaving(layer: ModuleSpec) -> ModuleSpec:
    layer.submodules.self_attention.submodules.core_attention.params["is_last"] = True
    return replace(layer, module=LastLayer)


def _round(layer: ModuleSpec, experts: bool, emulation: FP8Emulation) -> None:
    """Makes a local layer's four products, and those of each expert, fp8."""
    column, row = (
        ModuleSpec(module=module, params={"emulation": emulation})
        for module in (RoundedColumnParallel, RoundedRowParallel)
    )
    attention = layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = column, row
    for own in _mlps(layer, experts):
        own.linear_fc1, own.linear_fc2 = column, row


def _mlps(layer: ModuleSpec, experts: bool) -> list[Any]:
    """Submodules of a layer's gated MLPs: one, or the experts' and the shared experts'."""
    mlp = platform.submodules(layer.submodules.mlp)
    return [platform.submodules(part) for part in (mlp.experts, mlp.shared_experts)] if experts else [mlp]


class InPlaceGradients(TransformerLayer):
    """Layer whose transformer-engine products accumulate weight gradients in place.

    The model's own configuration leaves this off: Megatron's output layer would then require apex' kernel.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        config = copy(config)
        config.gradient_accumulation_fusion = True
        super().__init__(config, *args, **kwargs)


class LastLayer(TransformerLayer):
    """Last layer: all tokens have keys and values in it, but only tokens whose output is needed continue after
    attention.
    """

    def forward(
        self, hidden_states: Tensor, *unused: Any, packed_seq_params: ModelBatch, **more: Any
    ) -> tuple[Tensor, None]:
        """Returns ([n, 1, h], or [t, 1, h] if tokens cannot be dropped; no context), from [t, 1, h]."""
        batch, stays = packed_seq_params, hidden_states
        attended = self.self_attention(self.input_layernorm(hidden_states), None, packed_seq_params=batch)
        if batch.can_drop_tokens:
            stays, batch.has_dropped_tokens = hidden_states.index_select(0, batch.output_positions), True
        with self.bias_dropout_add_exec_handler():
            add = self.self_attn_bda(self.training, self.config.bias_dropout_fusion)
            hidden = add(attended, stays, self.hidden_dropout)
        return self._forward_mlp(hidden), None


class AllHeadsAttention(SelfAttention):
    """Self-attention with OLMo's norms of queries and keys.

    The spec cannot name them: Megatron wants `qk_layernorm` for that, and would then sum their gradient over tensor
    parallelism.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        norm = partial(AllHeadsNorm, config, self.hidden_size_per_attention_head, config.layernorm_epsilon)
        self.q_layernorm = norm(heads=config.num_attention_heads)
        self.k_layernorm = norm(heads=config.num_query_groups)


class GatedAttention(SelfAttention):
    """Self-attention with a gate for each channel of its result. Each head's gate is behind its query, as on the hub;
    Megatron has the gates of a group behind all of its queries.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *unused: Any, **more: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns query [t, 1, heads, d], key and value [t, 1, groups, d], gate [t, 1, heads, d]."""
        joined, _ = self.linear_qkv(hidden_states)
        width, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        both, key, value = joined.unflatten(-1, (groups, -1)).tensor_split([-2 * width, -width], -1)
        query, gate = both.unflatten(-1, (-1, 2 * width)).flatten(2, 3).chunk(2, -1)
        return self.q_layernorm(query), self.k_layernorm(key), value, gate


class SwiGLU(MegatronModule):
    """Fused gated activation; Megatron's option for it is use_te_activation_func."""

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x)


class GeGLU(MegatronModule):
    """Gemma's gated activation with gelu."""

    def forward(self, x: Tensor) -> Tensor:
        return geglu(x)


class ClampedSwiGLU(MegatronModule):
    """Clamped gated activation of gpt-oss."""

    def forward(self, x: Tensor) -> Tensor:
        return clamped_swiglu(x)


ACTIVATIONS = {"silu": SwiGLU, "gelu_pytorch_tanh": GeGLU, "clamped": ClampedSwiGLU}


def _local_norm(family: Decoder) -> type[RMSNorm]:
    if family.shifted_norms:
        return ShiftedRMSNorm
    return WideRMSNorm if family.wide_norms else RMSNorm


def _local_layer(family: Decoder, config: TransformerConfig, kind: LayerArch) -> ModuleSpec:
    norm = _local_norm(family)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if kind.experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm if family.norms_before else IdentityOp
    for own in _mlps(layer, kind.experts):
        own.activation_func = ACTIVATIONS[family.gate or family.activation]
        if family.biases:
            own.linear_fc2 = BiasedExpertRow
    if kind.delta:
        from mrl.models.gated_delta_net import delta_net_spec  # megatron-core 0.16 has another module in that place

        parts.self_attention = delta_net_spec()
        return layer
    attention = parts.self_attention.submodules
    core = {"window": kind.window, "rope": kind.rope, "sinks": family.sinks}
    attention.core_attention = ModuleSpec(module=PackedAttention, params=core)
    if config.multi_latent_attention:
        parts.self_attention.module = LatentAttention
        attention.core_attention.params["rope"] = None  # already rotated
        attention.q_layernorm = attention.kv_layernorm = norm
    elif family.norms_all_heads:
        parts.self_attention.module = AllHeadsAttention
    elif config.qk_layernorm:
        if family.gated_attention:
            parts.self_attention.module = GatedAttention
        attention.q_layernorm = attention.k_layernorm = norm
    if family.norms_behind:
        parts.self_attn_bda = parts.mlp_bda = ModuleSpec(module=NormThenAdd, params={"norm": norm, "config": config})
    return layer


def _transformer_engine_layer(config: TransformerConfig, kind: LayerArch) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if kind.experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    layer.module = InPlaceGradients
    layer.submodules.self_attention.submodules.core_attention = transformer_engine_attention()
    if kind.experts:  # their norm is a separate module: store it as the local layers' norm
        layer.submodules.sharded_state_dict_keys_map |= MLP_NORM
    return layer


def freeze_router_bias(chunk: nn.Module) -> None:
    """Turns the routers' bias buffers into parameters without gradient, so that loading and saving weights includes
    them.
    """
    for module in chunk.modules():
        if isinstance(module, TopKRouter) and module.expert_bias is not None:
            bias = module._buffers.pop("expert_bias")
            module.register_parameter("expert_bias", nn.Parameter(bias, requires_grad=False))


def _transformer_engine_norm() -> type:
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
