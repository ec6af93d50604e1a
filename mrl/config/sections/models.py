"""Sections of the language models: layout, optimizer, and source of the weights."""

from __future__ import annotations

import math
from typing import Literal

from mrl.config.sections.lora import LoRAConfig
from mrl.config.sections.precision import PrecisionConfig
from mrl.options.base import (
    BelowOne,
    FilePath,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Section,
)


class ParallelConfig(Section):
    """Parallel layout of a model. The data-parallel size follows: world size / (tensor * pipeline * context)."""

    tensor: PositiveInt = 1  # tensor-parallel size: ranks that share the matrices of a layer
    pipeline: PositiveInt = 1  # pipeline-parallel size: number of stages
    context: PositiveInt = 1  # context-parallel size: ranks that share a sequence
    expert: PositiveInt = 1  # expert-parallel size: ranks that share the experts of a layer
    # tensor-parallel size of experts; null: `tensor` when expert is 1, else 1
    expert_tensor: PositiveInt | None = None
    virtual_pipeline: PositiveInt | None = None  # interleaved chunks of layers per pipeline stage; null: one
    first_stage_layers: PositiveInt | None = None  # layers of the first pipeline stage, for an uneven split
    last_stage_layers: PositiveInt | None = None  # layers of the last pipeline stage
    sequence: bool = True  # sequence parallelism, if tensor > 1

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor or (self.tensor if self.expert == 1 else 1)


class MuonConfig(Section):
    """Muon for matrices: all weights of two dimensions but embedding, output layer and value head, which keep Adam.

    Their momentum is orthogonalized by Newton-Schulz iterations in the model's dtype, one tensor of the Hugging Face
    files at a time. Learning rate and weight decay are those of `optimizer`, as in Moonlight and Kimi K2.
    """

    momentum: Fraction = 0.95  # decay of the mean of gradients
    nesterov: bool = True  # orthogonalize the mean one update ahead
    iterations: PositiveInt = 5  # Newton-Schulz iterations
    # size of the update. adam: 0.2 * sqrt(larger side), as large as Adam's usual updates, so that learning rates carry
    # over; spectral: sqrt(outputs / inputs), at least 1
    scale: Literal["adam", "spectral"] = "adam"
    lr_factor: PositiveFloat = 1.0  # learning rate of the matrices, as a multiple of `lr`


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay; linear warm-up from 0 over `warmup_steps` updates, then `decay`.

    The decay is that of transformers, TRL and Megatron: the first update after the warm-up has `lr`. `min_lr` is
    reached after the last of `decay_steps`, whose rate is still above `min_lr`. The warm-up differs: theirs starts at
    0, so that the first update has no effect; here update k of the warm-up has lr * k / warmup_steps.
    """

    lr: NonNegativeFloat = 1e-6  # peak learning rate, after warm-up
    warmup_steps: NonNegativeInt = 0  # warm-up updates from 0 to `lr`
    decay: Literal["constant", "linear", "cosine"] = "constant"  # shape of the decay from `lr` to `min_lr`
    # updates until `min_lr` is reached, including warm-up. Required by linear and cosine, except with batch.epochs
    # (null: all updates of the run). Must cover all updates of the run, unless min_lr is given
    decay_steps: PositiveInt | None = None
    min_lr: NonNegativeFloat = 0.0  # learning rate of updates after `decay_steps`
    beta1: BelowOne = 0.9  # decay of Adam's mean of gradients
    beta2: BelowOne = 0.95  # decay of Adam's mean of squared gradients
    eps: PositiveFloat = 1e-8  # added to Adam's denominator
    weight_decay: NonNegativeFloat = 0.0  # subtract lr * this * weight at every update
    clip_grad: PositiveFloat = 1.0  # maximum gradient norm over all weights; larger gradients are scaled down
    muon: MuonConfig | None = None  # train matrices with Muon; null: everything with Adam

    def learning_rate(self, update: int) -> float:
        """Returns the learning rate of update `update`, counted from 1 (0: before a warm-up)."""
        if self.warmup_steps and update <= self.warmup_steps:
            return self.lr * update / self.warmup_steps
        if self.decay == "constant" or self.decay_steps is None:
            return self.lr
        share = min(1.0, max(0, update - 1 - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1 - share if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * share))
        return self.min_lr + (self.lr - self.min_lr) * left


class TrainConfig(Section):
    """Layout and training of one model."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_microbatch: PositiveInt = 16384  # maximum tokens of packed sequences per micro-batch; bounds memory
    # activation recomputation in the backward pass. selective: dense MLPs and attention (keeps less than half of the
    # activations); full: every layer (keeps a tenth)
    recompute: Literal["none", "selective", "full"] = "none"
    # implementation of the layers. local: mrl's own on torch; auto: transformer_engine if it is usable, but local for
    # float32, which transformer-engine computes in TF32
    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    # offload to host memory while not needed. optimizer: gradients, float32 main weights and Adam moments; all: also
    # the parameters
    offload: Literal["none", "optimizer", "all"] = "none"
    precision: PrecisionConfig = PrecisionConfig()
    lora: LoRAConfig | None = None  # train LoRA adapters only; null: all weights


class ActorConfig(TrainConfig):
    """The policy.

    routing_replay, for MoE models: reuses recorded expert choices instead of routing again in every pass. trainer:
    updates reuse the routing of the pass for old log-probs (R2). engine: old log-probs and updates reuse the routing of
    the engine during generation (R3). The reference always computes its own routing.
    """

    routing_replay: Literal["off", "trainer", "engine"] = "off"  # source of the routing in updates; see the section
    # steps between extra passes that measure the mismatch without replay; 0: never. For routing_replay: engine
    routing_compare_steps: NonNegativeInt = 0


class CriticConfig(TrainConfig):
    """The value model: required by gae, optional with adv_estimator: function. It has its own layout and optimizer."""

    path: FilePath | None = None  # Hugging Face directory; null: the actor's
    warmup_steps: NonNegativeInt = 0  # first steps of the run, in which only the critic is trained
    frozen: bool = False  # never train the critic, for comparisons: a baseline of zero


class RefConfig(Section):
    """The reference policy; built only if a KL term needs it.

    frozen: a separate model. ema: the actor's moving average. refreshed: an earlier actor, at first with its initial
    weights; after every `refresh_every_steps` steps reference <- reference + refresh_share * (actor - reference). The
    weights of ema and refreshed are float32 in host memory (ema: as ema.offload says), and are swapped into the actor
    for its passes.
    """

    policy: Literal["frozen", "ema", "refreshed"] = "frozen"  # whether and how the reference changes; see the section
    refresh_every_steps: PositiveInt | None = None  # steps between refreshes; refreshed only
    refresh_share: PositiveFraction = 1.0  # share of the way to the actor; refreshed only
    path: FilePath | None = None  # Hugging Face directory; null: the actor's initial weights
    parallel: ParallelConfig | None = None  # layout; null: the actor's
    max_tokens_per_microbatch: PositiveInt | None = None  # maximum tokens per micro-batch; null: the actor's
    precision: PrecisionConfig | None = None  # precision of matrix products; null: the actor's
    offload: Literal["none", "all"] = "none"  # all: keep parameters in host memory while they are not needed


class VisionConfig(Section):
    """The vision tower of a vision model (Qwen2.5-VL, Qwen3-VL)."""

    train: bool = False  # train the tower too; false: frozen, without gradients and Adam state


class ModelConfig(Section):
    """The initial weights and the tokenizer."""

    path: FilePath  # Hugging Face directory: config.json, tokenizer, safetensors
    from_scratch: bool = False  # start from random weights, with config.json only
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # dtype of the weights in computation; optimizers keep float32
    allow_pickle: bool = False  # accept pytorch_model.bin (tensors only) if there are no safetensors
    chat_template: FilePath | None = None  # Jinja file that replaces the tokenizer's chat template, in exports too
    eos_token: str | None = None  # EOS token of responses and of answers in sft; null: the tokenizer's
    vision: VisionConfig = VisionConfig()
