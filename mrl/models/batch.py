"""What a forward pass needs to know about its packed tokens, in the place where Megatron hands it to every layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mrl import platform
from mrl.core import PackedBatch
from mrl.models.attention import AttentionPlan
from mrl.models.mcore import PackedSeqParams
from mrl.parallel import Mesh

Output = Literal["log_probs", "distribution", "logits", "values"]


def on_device(batch: PackedBatch) -> PackedBatch:
    """The batch with what a model computes with on this rank's device; `cu_seqlens` stays on the CPU, where attention
    is planned."""
    here = [batch.tokens, batch.position_ids, batch.rows, batch.labels, batch.dest]
    tokens, position_ids, rows, labels, dest = platform.to_device(here, platform.device())
    return replace(batch, tokens=tokens, position_ids=position_ids, rows=rows, labels=labels, dest=dest)


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
    cos_sin: tuple[Tensor, Tensor] | None = None  # of the tokens' rotary angles, filled in by the model
    starts: Tensor = field(default_factory=_none)  # [S + 1]: of the padded sequences, before the context-parallel cut
    longest: int = 0  # tokens of such a sequence
    cp: tuple[int, int] = (1, 0)  # context-parallel size and rank

    @staticmethod
    def make(
        batch: PackedBatch, mesh: Mesh, temperature: float, output: Output, entropy_grad: bool = False
    ) -> ModelBatch:
        """batch: as `on_device` gives it"""
        return ModelBatch(
            qkv_format="packed",
            rows=batch.rows,
            labels=batch.labels,
            temperature=temperature,
            output=output,
            entropy_grad=entropy_grad,
            starts=batch.cu_seqlens,
            longest=batch.max_seqlen,
            cp=(mesh.cp, mesh.cp_rank),
        )

    @cached_property
    def plan(self) -> AttentionPlan:
        """For our own attention; made once for all layers."""
        return AttentionPlan.make(self.starts, *self.cp, platform.device())

    @cached_property
    def thd(self) -> PackedSeqParams:
        """For transformer-engine's attention; made once for all layers."""
        (starts,) = platform.to_device([self.starts.to(torch.int32)], platform.device())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )
