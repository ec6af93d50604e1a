"""The critic: the policy's body with a scalar head. Never tied, so that it pipelines from a tied checkpoint too."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mrl import platform
from mrl.config.sections.precision import FP8Config
from mrl.families import ModelArch
from mrl.models.batch import ModelBatch
from mrl.models.gpt import PackedGPT
from mrl.models.mcore import MegatronModule, TransformerConfig, ensure_metadata_has_dp_cp_group


class Critic(PackedGPT):
    """`value_head.weight` [1, h] is replicated over the tensor-parallel group and starts at zero: the first values are
    0. Every rank applies it to the same rows, so its gradient is complete on each and must not be summed over them."""

    def __init__(
        self,
        arch: ModelArch,
        config: TransformerConfig,
        inv_freq: Tensor,
        *,
        tied: bool,
        vp_stage: int | None,
        precision: FP8Config,
    ) -> None:
        super().__init__(arch, config, inv_freq, tied=False, vp_stage=vp_stage, precision=precision)
        if self.post_process:
            del self.output_layer
            self.value_head = nn.Linear(
                arch.hidden_size, 1, bias=False, device=platform.device(), dtype=config.params_dtype
            )
            nn.init.zeros_(self.value_head.weight)

    def head(self, hidden: Tensor, batch: ModelBatch) -> Tensor:
        """float32 [1, n]."""
        if batch.output != "values":
            raise ValueError(f"a critic has no output {batch.output!r}; it has values")
        rows = self.response_rows(hidden, batch, partial_grad=False)
        return (rows.float() @ self.value_head.weight.float().T).T

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """GPTModel's own expects an output layer; the plain form of its base class is right for a replicated head."""
        return MegatronModule.sharded_state_dict(
            self, prefix, sharded_offsets, ensure_metadata_has_dp_cp_group(metadata)
        )
