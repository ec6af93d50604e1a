"""Imports of this package from megatron-core, made after the platform is set up for it."""

from __future__ import annotations

from mrl import platform

platform.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import MegatronModule, ModuleSpec, TransformerConfig  # noqa: E402
from megatron.core.transformer.attention import SelfAttention  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction  # noqa: E402
from megatron.core.transformer.multi_latent_attention import MLASelfAttention  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset  # noqa: E402
from megatron.core.transformer.utils import (  # noqa: E402
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)

__all__ = [
    "ColumnParallelLinear",
    "GPTModel",
    "IdentityOp",
    "MLASelfAttention",
    "MLATransformerConfig",
    "MegatronModule",
    "ModuleSpec",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "RouterReplay",
    "RouterReplayAction",
    "RowParallelLinear",
    "SelfAttention",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "copy_to_tensor_model_parallel_region",
    "ensure_metadata_has_dp_cp_group",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_num_layers_to_build",
    "get_transformer_layer_offset",
    "make_sharded_tensors_for_checkpoint",
    "parallel_state",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "set_tensor_model_parallel_attributes",
]
