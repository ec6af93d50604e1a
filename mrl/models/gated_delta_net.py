"""Gated delta nets over packed tokens, from Megatron's modules.

Megatron's gated delta net needs the kernels of flash-linear-attention for packed sequences. Here its rows are in the
order of the key heads: tensor and context parallelism take whole heads, as of attention.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from megatron.core.ssm.gated_delta_net.common import _build_thd_cp_a2a_perm
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mrl.kernels.gated_delta import Chunks, causal_conv, gated_delta_rule
from mrl.kernels.layers import rms_norm
from mrl.models.batch import ModelBatch
from mrl.models.mcore import (
    ColumnParallelLinear,
    MegatronModule,
    ModuleSpec,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from mrl.models.norm import RMSNorm


def delta_net_spec() -> ModuleSpec:
    """Returns the spec of a layer's gated delta net, in place of its attention."""
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=RMSNorm, out_proj=RowParallelLinear)
    return ModuleSpec(module=PackedDeltaNet, submodules=parts)


class PackedDeltaNet(GatedDeltaNet):
    """Gated delta net whose `packed_seq_params` is a ModelBatch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.out_norm.weight.sequence_parallel = False  # summed over the heads of all ranks in `forward`

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule  # Megatron wants one, and without flash-linear-attention has none

    def forward(
        self, hidden_states: Tensor, attention_mask: None = None, *, packed_seq_params: ModelBatch, **unused: Any
    ) -> tuple[Tensor, None]:
        """Returns ([t, 1, h] or [t / tp, 1, h], no bias), of the same shape as hidden_states.

        Under context parallelism each rank computes all tokens of a part of the heads.
        """
        batch, groups = packed_seq_params, self.pg_collection.cp
        joined, _ = self.in_proj(hidden_states)
        if groups.size() > 1:
            joined = tensor_a2a_cp2hp(joined, 0, -1, groups, undo_attention_load_balancing=False)
            starts = batch.starts.to(joined.device)
            to_sequences, back = _build_thd_cp_a2a_perm(starts, groups.size(), joined.size(0))
            joined = joined.index_select(0, to_sequences)
        heads = (get_parameter_local_cp(weight, 0, groups) for weight in (self.conv1d.weight, self.A_log, self.dt_bias))
        norm = self.out_norm.weight
        if self.tp_size > 1:  # its gradient is the sum over all ranks' heads
            norm = copy_to_tensor_model_parallel_region(norm, group=self.tp_group)
        # what it computes on the way is many times its inputs
        out: Tensor = checkpoint(self._heads, batch.chunks, joined, *heads, norm, use_reentrant=False)
        if groups.size() > 1:
            out = tensor_a2a_hp2cp(out.index_select(0, back), 0, -1, groups, redo_attention_load_balancing=False)
        result: tuple[Tensor, None] = self.out_proj(out)
        return result

    def _heads(
        self, chunks: Chunks, joined: Tensor, conv: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor
    ) -> Tensor:
        """joined [t, 1, rows of the input projection of some key heads] -> [t, 1, value heads * v]."""
        shared = self.num_value_heads // self.num_key_heads
        sizes = [self.key_head_dim, self.key_head_dim, shared * self.value_head_dim]
        by_head = joined.squeeze(1).unflatten(-1, (-1, sum(sizes) + sizes[-1] + 2 * shared))
        inputs, gate, beta, alpha = by_head.split([sum(sizes), sizes[-1], shared, shared], -1)
        query, key, value = F.silu(causal_conv(inputs.flatten(1), conv, chunks)).view(inputs.shape).split(sizes, -1)
        value, gate = (x.reshape(len(x), -1, self.value_head_dim) for x in (value, gate))
        decay = -a_log.float().exp() * F.softplus(alpha.flatten(1).float() + dt_bias)
        out = gated_delta_rule(query, key, value, decay, beta.flatten(1).sigmoid(), chunks)
        out = (rms_norm(out, norm, self.out_norm.eps) * F.silu(gate.float())).to(out.dtype)
        return out.flatten(1).unsqueeze(1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """Shards heads as whole rows; Megatron's own takes its order of the rows for granted."""
        found: dict[str, Any] = MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
        own = {
            name: weight for name, weight in self.named_parameters() if name in ("A_log", "dt_bias", "conv1d.weight")
        }
        replicas = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        found |= make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, tp_group=self.tp_group, dp_cp_group=replicas
        )
        return found
