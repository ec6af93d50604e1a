"""Critic: the policy's body with a score head. It is never tied, so that a tied checkpoint can be pipelined too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mrl import platform
from mrl.config.sections.precision import FP8Config
from mrl.families import ModelArch
from mrl.models.batch import ModelBatch
from mrl.models.gpt import PackedGPT
from mrl.models.mcore import MegatronModule, TransformerConfig, ensure_metadata_has_dp_cp_group


class Critic(PackedGPT):
    """Critic or reward model. `value_head.weight` [score_heads, h] is float32 whatever the model's dtype.

    Rounded, the head would score different inputs alike. (Beside mxfp8 weights it is not float32: see
    `FP8Config.shares_buffers`.) It is replicated over the tensor-parallel group and starts at zero: the first values
    are 0. Every rank applies it to the same rows, so each rank's gradient is complete and must not be summed over the
    group.
    """

    def __init__(
        self,
        arch: ModelArch,
        config: TransformerConfig,
        inv_freq: Mapping[str, tuple[Tensor, float]],
        *,
        tied: bool,
        vp_stage: int | None,
        precision: FP8Config,
    ) -> None:
        super().__init__(arch, config, inv_freq, tied=False, vp_stage=vp_stage, precision=precision)
        if self.post_process:
            del self.output_layer
            dtype = config.params_dtype if precision.shares_buffers else torch.float32
            self.value_head = nn.Linear(
                arch.hidden_size, arch.score_heads, bias=False, device=platform.device(), dtype=dtype
            )
            nn.init.zeros_(self.value_head.weight)

    def head(self, hidden: Tensor, batch: ModelBatch) -> Tensor:
        """Returns the scores, float32 [score_heads, n]. Raises ValueError for another output than "values"."""
        if batch.output != "values":
            raise ValueError(f"a critic has no output {batch.output!r}; it has values")
        rows = self.response_rows(hidden, batch, partial_grad=False)
        return (rows.float() @ self.value_head.weight.T).T

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Uses the base class's plain form, because GPTModel's own expects an output layer."""
        return MegatronModule.sharded_state_dict(
            self, prefix, sharded_offsets, ensure_metadata_has_dp_cp_group(metadata)
        )
