"""RMSNorm that rounds where transformers' does, and that Megatron may use under sequence parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mrl import platform
from mrl.kernels.layers import rms_norm
from mrl.models.mcore import TransformerConfig


class RMSNorm(nn.Module):
    """Normalises in float32, rounds to the input's dtype, then scales. The weight's `sequence_parallel` mark makes
    Megatron sum its gradient over the tensor-parallel group, whose ranks each see a part of the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=platform.device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)
