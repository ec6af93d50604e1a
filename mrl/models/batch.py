"""What a forward pass needs to know about its packed tokens, in the place where Megatron hands it to every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mrl import platform
from mrl.core import PackedBatch
from mrl.models.attention import AttentionPlan
from mrl.models.mcore import PackedSeqParams
from mrl.parallel import Mesh

Output = Literal["log_probs", "distribution", "logits", "values"]


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass
class ModelBatch(PackedSeqParams):
    """Travels as `packed_seq_params`. Its `qkv_format` is not "thd", so that Megatron hands [t, 1, h, d] tensors to the
    attention and, with transformer-engine, applies RoPE to them in one go with our angles per token.

    rows [n] int64: local positions whose output is wanted; labels [n] int64: the token that follows each
    entropy_grad: whether the entropies take part in the loss
    """

    rows: Tensor = field(default_factory=_none)
    labels: Tensor = field(default_factory=_none)
    temperature: float = 1.0
    output: Output = "log_probs"
    entropy_grad: bool = False
    plan: AttentionPlan | None = None
    cos_sin: tuple[Tensor, Tensor] | None = None  # of the tokens' rotary angles, filled in by the model
    thd: PackedSeqParams | None = None  # the same sequences, as transformer-engine wants them

    @staticmethod
    def make(
        batch: PackedBatch, mesh: Mesh, temperature: float, output: Output, entropy_grad: bool = False
    ) -> ModelBatch:
        """Move the batch to this rank's device and plan its attention: once a micro-batch, for all layers."""
        where = platform.device()
        fused = platform.transformer_engine_usable()
        return ModelBatch(
            qkv_format="packed",
            rows=batch.rows.to(where),
            labels=batch.labels.to(where),
            temperature=temperature,
            output=output,
            entropy_grad=entropy_grad,
            plan=None if fused else AttentionPlan.make(batch.cu_seqlens, mesh.cp, mesh.cp_rank, where),
            thd=_thd(batch, where) if fused else None,
        )


def _thd(batch: PackedBatch, where: torch.device) -> PackedSeqParams:
    starts = batch.cu_seqlens.to(where, torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
