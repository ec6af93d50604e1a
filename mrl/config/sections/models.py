"""Models: layout, optimizer, where the weights come from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class ParallelConfig(Section):
    """A layout. Data parallelism is what is left: world size / (tensor * pipeline * context)."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    expert_tensor: PositiveInt | None = None  # of the experts; null: `tensor` when expert is 1, else 1
    virtual_pipeline: PositiveInt | None = None  # model chunks a pipeline stage
    first_stage_layers: PositiveInt | None = None  # uneven pipeline split
    last_stage_layers: PositiveInt | None = None
    sequence: bool = True  # sequence parallelism wherever tensor > 1

    @property
    def expert_tensor_size(self) -> int:
        return self.expert_tensor or (self.tensor if self.expert == 1 else 1)


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay; linear warm-up from 0 over `warmup_steps` updates, then `decay`."""

    lr: NonNegativeFloat = 1e-6
    warmup_steps: NonNegativeInt = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    decay_steps: PositiveInt | None = None  # updates until `min_lr`, warm-up included
    min_lr: NonNegativeFloat = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: PositiveFloat = 1.0


class TrainConfig(Section):
    """How one model is laid out and trained."""

    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_microbatch: PositiveInt = 16384
    recompute: Literal["none", "selective", "full"] = "none"


class CriticConfig(TrainConfig):
    path: str | None = None  # Hugging Face directory; the actor's when null
    warmup_steps: NonNegativeInt = 0  # steps in which only the critic is trained
    frozen: bool = False  # never trained: a zero baseline, for comparisons


class RefConfig(Section):
    """The reference policy; built only if a KL term asks for it. Layout as the actor's when null.

    frozen: a model of its own. ema: the actor's moving average. refreshed: the actor as it was, at first its initial
    weights; after every `refresh_every_steps` steps reference <- reference + refresh_share * (actor - reference). The
    last two are float32 weights beside the actor's (host memory) and are computed with in its place.
    """

    policy: Literal["frozen", "ema", "refreshed"] = "frozen"
    refresh_every_steps: PositiveInt | None = None
    refresh_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    path: str | None = None  # the actor's initial weights when null
    parallel: ParallelConfig | None = None
    max_tokens_per_microbatch: PositiveInt | None = None


class ModelConfig(Section):
    path: str  # Hugging Face directory: config.json, tokenizer, safetensors
    from_scratch: bool = False  # random weights from config.json alone
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    allow_pickle: bool = False  # accept pytorch_model.bin (weights_only)
    eos_token: str | None = None  # in place of the tokenizer's: ends answers in sft, and samples
