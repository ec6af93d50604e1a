"""RMSNorm that rounds where transformers' does, and that Megatron may use under sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mrl import platform
from mrl.kernels.layers import rms_norm, shifted_rms_norm
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


class ShiftedRMSNorm(RMSNorm):
    """Scales by 1 + weight, which starts at zero, before it rounds: Gemma's."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(config, hidden_size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return shifted_rms_norm(x, self.weight, self.eps)


class NormThenAdd(nn.Module):
    """What a layer does with a result of its attention or MLP: norms it, then adds it to what came in. Megatron calls
    the place bias-dropout-add; biases and dropout there are none."""

    def __init__(self, norm: type[RMSNorm], config: TransformerConfig) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """The function of ((result [t, 1, h], no bias), what came in, no dropout) -> their sum."""
        return self._add

    def _add(self, result: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        """Megatron calls it with gradients on, also in passes without them: these would keep every layer's input."""
        (x, _) = result
        with torch.set_grad_enabled(x.requires_grad or residual.requires_grad):
            added: Tensor = residual + self.norm(x)
        return added
