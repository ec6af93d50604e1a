"""Multi-head latent attention (MLA) over packed tokens, from Megatron's modules, for machines without
transformer-engine.

Megatron 0.16's own takes positions from the packed row, and with these layers its gradient is wrong under tensor
parallelism: the rotary key that all heads share is gathered by an operation whose backward pass takes a slice of the
gradient, although that covers this rank's heads alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.kernels.layers import rotate
from mrl.models.mcore import (
    MLASelfAttention,
    MLATransformerConfig,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)

LATENT_EPS = 1e-6  # of the norms of latent vectors in transformers, whatever `rms_norm_eps` is


class LatentAttention(MLASelfAttention):
    """MLA whose `packed_seq_params` is a ModelBatch."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.kv_layernorm.eps = LATENT_EPS
        if config.q_lora_rank is not None:
            self.q_layernorm.eps = LATENT_EPS

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: Any = None,
        inference_context: None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Returns query, key [t, heads of this rank, unrotated + rotated channels], value [t, heads, v], and two unused
        values.

        hidden_states [t, 1, h] (t / tp under sequence parallelism).
        """
        config, heads = self.config, self.num_attention_heads_per_partition
        plain, turned = config.qk_head_dim, config.qk_pos_emb_head_dim
        compressed, _ = self.linear_kv_down_proj(hidden_states)
        latent, key_turned = self._whole(compressed).split([config.kv_lora_rank, turned], -1)
        up, _ = self.linear_kv_up_proj(self.kv_layernorm(self._own(latent)))
        key_plain, value = up.squeeze(1).unflatten(-1, (heads, -1)).split([plain, config.v_head_dim], -1)
        query_plain, query_turned = (
            self._query(hidden_states).squeeze(1).unflatten(-1, (heads, -1)).split([plain, turned], -1)
        )
        if config.tensor_model_parallel_size > 1:  # the gradient is the sum over all ranks' heads
            key_turned = copy_to_tensor_model_parallel_region(key_turned, group=self.pg_collection.tp)
        (cos_sin,) = packed_seq_params.cos_sin.values()
        query_turned, key_turned = (rotate(_halves(x), *cos_sin) for x in (query_turned, key_turned))
        key = torch.cat([key_plain, key_turned.expand(-1, heads, -1)], -1)
        return torch.cat([query_plain, query_turned], -1), key, value, None, None

    def _query(self, hidden_states: Tensor) -> Tensor:
        if self.config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
            return query
        compressed, _ = self.linear_q_down_proj(hidden_states)
        query, _ = self.linear_q_up_proj(self.q_layernorm(self._own(self._whole(compressed))))
        return query

    def _whole(self, x: Tensor) -> Tensor:
        """Gathers all ranks' channels of all tokens."""
        group = self.pg_collection.tp
        return gather_from_tensor_model_parallel_region(x, group=group) if group.size() > 1 else x

    def _own(self, x: Tensor) -> Tensor:
        """Returns the tokens that a norm and a column-parallel layer take."""
        if not self.config.sequence_parallel:
            return x
        return scatter_to_sequence_parallel_region(x, group=self.pg_collection.tp)


def _halves(x: Tensor) -> Tensor:
    """Moves channels that rotate together from neighbours into two halves."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)
