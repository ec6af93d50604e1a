"""Models: layout, optimizer, where the weights come from."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.base import (
    FilePath,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from mrl.config.sections.lora import LoRAConfig
from mrl.config.sections.precision import PrecisionConfig


class ParallelConfig(Section):
    """How a model is laid out over the ranks. Data parallelism is what is left: world size / (tensor * pipeline *
    context)."""

    tensor: PositiveInt = 1  # ranks that share every layer's matrices
    pipeline: PositiveInt = 1  # ranks that the layers are spread over, in stages
    context: PositiveInt = 1  # ranks that every sequence is cut over
    expert: PositiveInt = 1  # ranks that a layer's experts are spread over
    # ranks that share an expert's matrices; null: `tensor` when expert is 1, else 1
    expert_tensor: PositiveInt | None = None
    virtual_pipeline: PositiveInt | None = None  # chunks of layers a pipeline stage, taken in turns; null: one
    first_stage_layers: PositiveInt | None = None  # layers of the first pipeline stage, for an uneven split
    last_stage_layers: PositiveInt | None = None  # layers of the last pipeline stage
    sequence: bool = True  # sequence parallelism wherever tensor > 1

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor or (self.tensor if self.expert == 1 else 1)


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay; linear warm-up from 0 over `warmup_steps` updates, then `decay`.

    The decay is that of transformers, TRL and Megatron: the first update after the warm-up has `lr`, and `min_lr` is
    reached after the last of `decay_steps`, so that this one still learns. Their warm-up starts at 0, so that their
    first update learns nothing; here update k of the warm-up has lr * k / warmup_steps.
    """

    lr: NonNegativeFloat = 1e-6  # the highest learning rate, after warm-up
    warmup_steps: NonNegativeInt = 0  # updates from 0 up to `lr`
    decay: Literal["constant", "linear", "cosine"] = "constant"  # from `lr` down to `min_lr`
    # updates before `min_lr` is reached, warm-up included; as many as the run makes, unless min_lr is given
    decay_steps: PositiveInt | None = None
    min_lr: NonNegativeFloat = 0.0  # learning rate of updates after `decay_steps`
    beta1: Fraction = 0.9  # decay of Adam's mean of gradients
    beta2: Fraction = 0.95  # decay of Adam's mean of squared gradients
    eps: PositiveFloat = 1e-8  # added to Adam's denominator
    weight_decay: NonNegativeFloat = 0.0  # lr * this * weight is taken off at every update
    clip_grad: PositiveFloat = 1.0  # longest gradient (norm over all weights); longer ones are scaled down to it

    def learning_rate(self, update: int) -> float:
        """Returns the rate of update `update`, from 1 (0: before a warm-up): linear warm-up, then decay to `min_lr`."""
        if self.warmup_steps and update <= self.warmup_steps:
            return self.lr * update / self.warmup_steps
        if self.decay == "constant" or self.decay_steps is None:
            return self.lr
        share = min(1.0, max(0, update - 1 - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1 - share if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * share))
        return self.min_lr + (self.lr - self.min_lr) * left


class TrainConfig(Section):
    """How one model is laid out and trained."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_microbatch: PositiveInt = 16384  # tokens of packed sequences in one pass, at most: bounds memory
    # activations computed again in the backward pass: of dense MLPs and attention (less than half is left), or of every
    # layer (a tenth)
    recompute: Literal["none", "selective", "full"] = "none"
    # what the layers are made of: mrl's on torch (local), or transformer-engine's; auto: transformer-engine's where it
    # can be used, but local for float32, which it multiplies as TF32
    layers: Literal["auto", "local", "transformer_engine"] = "auto"
    # what waits in host memory while it is not needed: gradients, main weights and Adam's moments (optimizer), the
    # parameters too (all)
    offload: Literal["none", "optimizer", "all"] = "none"
    precision: PrecisionConfig = PrecisionConfig()
    lora: LoRAConfig | None = None  # adapters alone are trained; null: all weights


class ActorConfig(TrainConfig):
    """The policy that samples are drawn with.

    routing_replay: what a router would choose anew in every pass is given to it, for models with experts. trainer: the
    experts that it chose when the old log-probs were computed, in the updates (R2). engine: those that the engine chose
    when it drew the sample, in the old log-probs and the updates (R3). The reference chooses for itself.
    """

    routing_replay: Literal["off", "trainer", "engine"] = "off"  # whose experts the updates take, see the section
    # every so many steps one more pass tells the mismatch without replay; 0: never. engine only
    routing_compare_steps: NonNegativeInt = 0


class CriticConfig(TrainConfig):
    """The model of values that gae needs, laid out and trained by itself."""

    path: FilePath | None = None  # Hugging Face directory; the actor's when null
    warmup_steps: NonNegativeInt = 0  # steps in which only the critic is trained
    frozen: bool = False  # never trained: a zero baseline, for comparisons


class RefConfig(Section):
    """The reference policy; built only if a KL term asks for it. Layout as the actor's when null.

    frozen: a model of its own. ema: the actor's moving average. refreshed: the actor as it was, at first its initial
    weights; after every `refresh_every_steps` steps reference <- reference + refresh_share * (actor - reference). The
    last two are float32 weights beside the actor's (host memory) and are computed with in its place.
    """

    policy: Literal["frozen", "ema", "refreshed"] = "frozen"  # whether and how it moves, see the section
    refresh_every_steps: PositiveInt | None = None  # steps from one refresh to the next; refreshed only
    refresh_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the way to the actor; refreshed only
    path: FilePath | None = None  # Hugging Face directory; the actor's initial weights when null
    parallel: ParallelConfig | None = None  # the actor's when null
    max_tokens_per_microbatch: PositiveInt | None = None  # tokens a pass, at most; the actor's when null
    precision: PrecisionConfig | None = None  # the actor's when null
    offload: Literal["none", "all"] = "none"  # all: its parameters wait in host memory while it does not compute


class VisionConfig(Section):
    """The tower of a model that sees pictures (Qwen2.5-VL, Qwen3-VL), which makes features of them."""

    train: bool = False  # whether the tower is trained with the rest; frozen, it costs no gradients and no Adam state


class ModelConfig(Section):
    """The weights that the run starts from, and their tokenizer."""

    path: FilePath  # Hugging Face directory: config.json, tokenizer, safetensors
    from_scratch: bool = False  # random weights, from config.json alone
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the weights that are computed with; optimizers keep float32
    allow_pickle: bool = False  # accept pytorch_model.bin (tensors only) where there are no safetensors
    chat_template: FilePath | None = None  # a Jinja file, in place of the tokenizer's own; exports have it too
    eos_token: str | None = None  # in place of the tokenizer's: ends answers in sft, and samples
    vision: VisionConfig = VisionConfig()
