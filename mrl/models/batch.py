"""Inputs of a forward pass besides its packed tokens, passed where Megatron hands them to every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast

import torch
from torch import Tensor

from mrl import platform
from mrl.core import PackedBatch
from mrl.families.table import DELTA_CHUNK
from mrl.kernels.gated_delta import Chunks
from mrl.kernels.linear_divergence import Divergence, TopTokens
from mrl.kernels.linear_logprob import LossGradients
from mrl.models.attention_plan import AttentionPlan
from mrl.models.mcore import PackedSeqParams
from mrl.models.routing import Routing
from mrl.models.shared_tokens import SharedTokens
from mrl.parallel import Mesh

Output = Literal["log_probs", "distribution", "hidden_states", "lm_head_quantization_error", "logits", "values"]


@dataclass(frozen=True)
class PassOptions:
    """Additional computations of a training pass.

    smoothing: also computes the mean log-prob over the vocabulary
    described: also computes which labels are the argmax, and the mean logits
    noise: alpha of NEFTune's noise on the embeddings, 0: none; drops: applies the adapters' dropout;
    seed: of both, different for every step
    """

    smoothing: bool = False
    described: bool = False
    noise: float = 0.0
    drops: bool = False
    seed: int = 0

    @property
    def by_sample(self) -> bool:
        """True if a token's result depends on the sample it belongs to."""
        return self.drops or self.noise > 0


DEFAULT_PASS_OPTIONS = PassOptions()


def on_device(batch: PackedBatch) -> PackedBatch:
    """Returns the batch with the model's inputs on this rank's device; `cu_seqlens` stays on the CPU for attention
    planning.
    """
    names = (
        "tokens",
        "position_ids",
        "output_positions",
        "labels",
        "response_indices",
        "image_positions",
        "image_feature_indices",
    )
    here = platform.to_device([vars(batch)[name] for name in names], platform.device())
    return replace(batch, **cast(dict[str, Any], dict(zip(names, here, strict=True))))


@dataclass
class Images:
    """Images of a micro-batch, for the first stage.

    pixels [patches, patch values] float32; grids [k, 3]: for each image 1 and its rows and columns of patches
    at [m]: positions of this context-parallel rank that take a feature; row [m]: the feature's index
    deep: (positions, features) that layer i adds to its output; filled in by the model
    """

    pixels: Tensor
    grids: Tensor
    at: Tensor
    row: Tensor
    deep: tuple[tuple[Tensor, Tensor], ...] = ()

    @staticmethod
    def make(batch: PackedBatch, pixels: Tensor) -> Images:
        """Builds the images of `batch`, which comes from `on_device`; pixels [patches, patch values]."""
        grids = torch.nn.functional.pad(batch.images[:, 2:4], (1, 0), value=1)
        pixels, grids = platform.to_device([pixels, grids], platform.device())
        return Images(pixels, grids, batch.image_positions, batch.image_feature_indices)


@dataclass(frozen=True)
class TeacherRows:
    """Output positions of a micro-batch whose tokens one teacher teaches.

    rows [m] int64: among the n positions; teacher: its hidden states [m, h] and this rank's part of its lm_head [padded
    vocabulary / tp, h], sharded as the student's, or its top tokens; vocab_size: ids that both models have
    """

    rows: Tensor
    teacher: tuple[Tensor, Tensor] | TopTokens
    vocab_size: int


@dataclass(frozen=True)
class TeacherBatch:
    """Teachers of a micro-batch. token_weights [n]: gradient of the loss by the divergence of each position."""

    teachers: tuple[TeacherRows, ...]
    divergence: Divergence
    token_weights: Tensor


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass
class ModelBatch(PackedSeqParams):
    """Inputs of every layer, passed as `packed_seq_params`.

    Its `qkv_format` is not "thd", so that Megatron passes [t, 1, h, d] tensors to the attention and, with
    transformer-engine, applies RoPE to them at once with mrl's angles per token.

    positions [t] int64: of the local tokens in their sequences
    output_positions [n] int64: local positions whose output is needed; labels [n] int64: the token that follows each
    entropy_grad: the loss depends on the entropies; loss_gradients: gradients of the loss by log-probs and entropies,
    if the loss is local to each token
    """

    positions: Tensor = field(default_factory=_none)
    output_positions: Tensor = field(default_factory=_none)
    labels: Tensor = field(default_factory=_none)
    temperature: float = 1.0
    output: Output = "log_probs"
    entropy_grad: bool = False
    loss_gradients: LossGradients | None = None
    # cosines and sines of the tokens' rotary angles, by table, filled in by the model
    cos_sin: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    starts: Tensor = field(default_factory=_none)  # [S + 1]: of the padded sequences, before the context-parallel cut
    longest: int = 0  # tokens of such a sequence
    shared_index: Tensor | None = None  # as in `mrl.core.PackedBatch`
    cp: tuple[int, int] = (1, 0)  # context-parallel size and rank
    extras: PassOptions = DEFAULT_PASS_OPTIONS
    samples: Tensor = field(default_factory=_none)  # [S]: the packed sequences' indices in the rollout
    seq_lens: Tensor = field(default_factory=_none)  # [S], without padding
    images: Images | None = None  # on the first stage, where there are any
    routing: Routing | None = None  # routing to replay or record; None: routers choose, unrecorded
    distillation: TeacherBatch | None = None  # on the last stage, in passes that learn from teachers
    # True if the hidden states are those of `output_positions` alone: from the last layer on
    has_dropped_tokens: bool = False

    @staticmethod
    def make(
        batch: PackedBatch,
        mesh: Mesh,
        temperature: float,
        output: Output,
        entropy_grad: bool = False,
        extras: PassOptions | None = None,
        loss_gradients: LossGradients | None = None,
        images: Images | None = None,
        routing: Routing | None = None,
        distillation: TeacherBatch | None = None,
    ) -> ModelBatch:
        """Builds the inputs from `batch`, which comes from `on_device`."""
        return ModelBatch(
            qkv_format="packed",
            positions=batch.position_ids[0],
            output_positions=batch.output_positions,
            labels=batch.labels,
            temperature=temperature,
            output=output,
            entropy_grad=entropy_grad,
            loss_gradients=loss_gradients,
            starts=batch.cu_seqlens,
            longest=batch.max_seqlen,
            shared_index=batch.shared_index,
            cp=(mesh.cp, mesh.cp_rank),
            extras=extras or DEFAULT_PASS_OPTIONS,
            samples=batch.samples,
            seq_lens=batch.seq_lens,
            images=images,
            routing=routing,
            distillation=distillation,
        )

    @cached_property
    def plan(self) -> AttentionPlan:
        """Plan of mrl's own attention; built once for all layers."""
        return AttentionPlan.make(self.starts, *self.cp, platform.device(), self.shared_index)

    @cached_property
    def chunks(self) -> Chunks:
        """Chunks of gated delta nets; built once for all layers."""
        return Chunks.make(self.starts, DELTA_CHUNK, platform.device())

    @property
    def can_drop_tokens(self) -> bool:
        """True if tokens outside `output_positions` can be dropped in the last layer; adapter dropout prevents it, as
        it depends on a token's index.
        """
        return not self.extras.drops

    @cached_property
    def last_layer_plan(self) -> AttentionPlan:
        """Plan of the last layer's attention, which returns only the tokens in `output_positions` if the others can be
        dropped.
        """
        return self.plan.for_outputs(self.output_positions) if self.can_drop_tokens else self.plan

    @cached_property
    def shared(self) -> SharedTokens | None:
        """Shared tokens for transformer-engine's attention, which takes whole sequences; built once for all layers."""
        return None if self.shared_index is None else SharedTokens.make(self.shared_index, platform.device())

    @cached_property
    def thd(self) -> PackedSeqParams:
        """Parameters of transformer-engine's attention; built once for all layers."""
        (starts,) = platform.to_device([self.starts.to(torch.int32)], platform.device())
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=self.longest,
            max_seqlen_kv=self.longest,
        )
