"""RMSNorm that rounds as in transformers and supports Megatron's sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mrl import platform
from mrl.kernels.layers import rms_norm, shifted_rms_norm, wide_rms_norm
from mrl.models.mcore import (
    ProcessGroupCollection,
    TransformerConfig,
    copy_to_tensor_model_parallel_region,
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)


class RMSNorm(nn.Module):
    """Normalises in float32, rounds to the input's dtype, then scales.

    The weight's `sequence_parallel` mark makes Megatron sum its gradient over the tensor-parallel group, whose ranks
    each see a part of the tokens.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=platform.device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


class ShiftedRMSNorm(RMSNorm):
    """Gemma's RMSNorm: scales by 1 + weight, which starts at zero, before rounding."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(config, hidden_size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return shifted_rms_norm(x, self.weight, self.eps)


class WideRMSNorm(RMSNorm):
    """OLMo's RMSNorm: scales before rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return wide_rms_norm(x, self.weight, self.eps)


class AllHeadsNorm(nn.Module):
    """RMSNorm of OLMo's queries and keys over the channels of all `heads` of a token, scaled before rounding.

    Each tensor-parallel rank has its heads and their part of the weight; the squares are summed over all ranks.
    `hidden_size` is that of one head, as Megatron passes it.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, heads: int) -> None:
        super().__init__()
        self.eps, self.channels = eps, heads * hidden_size
        self.group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"]).tp
        own = self.channels // self.group.size()
        self.weight = nn.Parameter(torch.ones(own, dtype=config.params_dtype, device=platform.device()))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[t, 1, heads of this rank, channels of a head] -> the same shape and dtype."""
        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        if self.group.size() > 1:  # each rank's heads give a part of their gradient
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.group)
        scale = (squares / self.channels + self.eps).rsqrt()
        return (wide * scale * self.weight.float().view(x.shape[-2:])).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Shards the weight; Megatron assumes that weights of foreign modules are equal on all ranks."""
        own = self.state_dict(prefix="", keep_vars=True)
        replicas = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, {"weight": 0}, sharded_offsets, tp_group=self.group, dp_cp_group=replicas
        )
        return found


class NormThenAdd(nn.Module):
    """Norms the result of attention or MLP, then adds it to the residual; Megatron's bias-dropout-add without
    either.
    """

    def __init__(self, norm: type[RMSNorm], config: TransformerConfig) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """Returns the function of ((result [t, 1, h], no bias), residual, no dropout) -> their sum."""
        return self._add

    def _add(self, result: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        """Adds without gradients where none are needed: Megatron leaves them on, which would keep every layer's
        input.
        """
        (x, _) = result
        with torch.set_grad_enabled(x.requires_grad or residual.requires_grad):
            added: Tensor = residual + self.norm(x)
        return added
