"""megatron-core's TransformerConfig from ModelArch and layout, with only the fusions that this machine supports."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl import platform
from mrl.config.schema import TrainConfig
from mrl.families import FAMILIES, ExpertArch, ModelArch
from mrl.families.arch import LatentAttentionArch
from mrl.models.layer_kind import layer_kind
from mrl.models.mcore import MLATransformerConfig, TransformerConfig
from mrl.models.precision import transformer_engine_fields
from mrl.parallel import Mesh


def transformer_config(arch: ModelArch, train: TrainConfig, mesh: Mesh, dtype: torch.dtype) -> TransformerConfig:
    """Returns the configuration. Raises UnsupportedModel for layers that this machine does not support."""
    fp8 = train.precision.fp8
    kind = "local" if fp8.emulate else layer_kind(train.layers, dtype, arch)
    fused = kind == "transformer_engine"
    of_kind, latent = (MLATransformerConfig, _latent(arch.latent)) if arch.latent else (TransformerConfig, {})
    return of_kind(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        softmax_scale=arch.attention_scale,
        ffn_hidden_size=arch.dense_width or arch.expert_width,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=FAMILIES[arch.family].biases,
        add_qkv_bias=arch.qkv_bias,
        attention_output_gate=FAMILIES[arch.family].gated_attention,
        qk_layernorm=arch.qk_norm and not FAMILIES[arch.family].norms_all_heads,  # else its gradient is summed over TP
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        deterministic_mode=platform.is_deterministic(),
        timers=platform.pass_timers(),
        moe_token_dispatcher_type="alltoall",  # the only one for variable lengths, also asked of dense models
        **_initialisation(),
        **_fusions(fused, dtype),
        **_layout(train, mesh),
        **_recompute(train, fused, experts=arch.experts is not None),
        **_experts(arch, fused),
        **transformer_engine_fields(fp8, kind),
        **latent,
        **_delta(arch),
    )


def _latent(latent: LatentAttentionArch) -> dict[str, Any]:
    """MLA fields; angles (including yarn's) and the scale are mrl's own."""
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.turned,
        "v_head_dim": latent.value,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
    }


def _delta(arch: ModelArch) -> dict[str, Any]:
    """Fields of gated delta nets; the list of layers turns off layer stacking on disk."""
    if arch.delta is None:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(layer.delta) for layer in arch.layers],
        "linear_conv_kernel_dim": arch.delta.kernel,
        "linear_key_head_dim": arch.delta.key,
        "linear_value_head_dim": arch.delta.value,
        "linear_num_key_heads": arch.delta.key_heads,
        "linear_num_value_heads": arch.delta.value_heads,
    }


def _leave_as_it_is(weight: Tensor) -> Tensor:
    return weight


def _initialisation() -> dict[str, Any]:
    """Leaves weights to `initialise` or a checkpoint.

    `perform_initialization` stays on, because Megatron marks parameters as tensor-parallel in the same place.
    """
    return {
        "perform_initialization": True,
        "use_cpu_initialization": platform.device().type == "cpu",
        "init_method": _leave_as_it_is,
        "output_layer_init_method": _leave_as_it_is,
        "embedding_init_method": _leave_as_it_is,
    }


def _fusions(fused: bool, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "transformer_impl": "transformer_engine" if fused else "local",
        "apply_rope_fusion": fused,
        "bias_activation_fusion": fused,
        "use_te_activation_func": not fused,  # here: specs.SwiGLU
        "bias_dropout_fusion": fused,
        # by apex' kernel; transformer-engine has its own: specs.InPlaceGradients
        "gradient_accumulation_fusion": not fused and dtype == torch.bfloat16 and platform.apex_usable(),
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
    }


def _layout(train: TrainConfig, mesh: Mesh) -> dict[str, Any]:
    """Parallel layout fields.

    Interleaved stages run only with overlapped point-to-point calls. On gloo, stage outputs must stay allocated:
    freeing them silently gives wrong gradients.
    """
    cfg = train.parallel
    uneven = {
        "num_layers_in_first_pipeline_stage": cfg.first_stage_layers,
        "num_layers_in_last_pipeline_stage": cfg.last_stage_layers,
    }
    return {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "virtual_pipeline_model_parallel_size": mesh.vpp,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "sequence_parallel": cfg.sequence and mesh.tp > 1,
        "overlap_p2p_comm": mesh.vpp is not None,
        "batch_p2p_comm": mesh.vpp is None,
        "batch_p2p_sync": False,  # a device synchronisation after each call, needed by older versions of torch only
        "deallocate_pipeline_outputs": platform.backend() == "nccl",
        **(uneven if mesh.pp > 1 else {}),
    }


def _recompute(train: TrainConfig, fused: bool, *, experts: bool) -> dict[str, Any]:
    """Recomputed modules; "selective" takes those with the most memory for their computation.

    These are the dense MLP (three activations of its width a token) and, in local layers, attention, which keeps padded
    sequences. transformer-engine's attention keeps nothing that its backward pass does not recompute anyway, but its
    experts' activation can be recomputed.
    """
    if train.recompute == "none":
        return {}
    if train.recompute == "selective":
        own = ["moe_act"] if experts else []
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp", *(own if fused else ["core_attn"])]}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _experts(arch: ModelArch, fused: bool) -> dict[str, Any]:
    """MoE fields.

    Softmax over the chosen experts equals renormalised softmax over all; otherwise softmax comes first.
    """
    experts = arch.experts
    if experts is None:
        return {}
    kinds = {"moe_layer_freq": [int(layer.experts) for layer in arch.layers]}  # turns off layer stacking on disk
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": arch.expert_width,
        "moe_router_pre_softmax": not experts.normalize_topk,
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused and platform.triton_usable(),  # transformer-engine's, which triton compiles
        **(kinds if arch.layers_differ else {}),
        **(_sigmoid(experts) if experts.sigmoid else {}),
    }


def _sigmoid(experts: ExpertArch) -> dict[str, Any]:
    """Sigmoid router fields.

    The bias would be updated by each expert's load; it is frozen (specs.freeze_router_bias).
    """
    grouped = {"moe_router_num_groups": experts.groups, "moe_router_group_topk": experts.per_token_groups}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": experts.scale,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        **(grouped if experts.groups > 1 else {}),
    }
