"""What a run keeps of its policy and its samples, and demonstrations that it learns from beside them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mrl.config.sections.base import PositiveFloat, PositiveInt, Section
from mrl.config.sections.data import DataConfig


class EMAConfig(Section):
    """A moving average of the actor's weights, float32 and sharded like its optimizer. After every update
    average <- decay * average + (1 - decay) * actor. `checkpoint.export_hf` writes it too, to RUN_DIR/hf_ema."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.992  # share of the average that an update leaves as it is
    offload: bool = True  # kept in host memory; false: on the device
    in_validation: bool = False  # every validation is also made with the average (two more pushes of weights)


class PTXConfig(Section):
    """Demonstrations that every update of the actor learns from as well (PPO-ptx, arXiv 2203.02155). Its loss gains
    coef * mean over their answers' tokens of -log p, at temperature 1."""

    data: DataConfig  # prompts and answers
    coef: PositiveFloat  # weight of that loss
    samples_per_update: PositiveInt  # demonstrations beside each mini-batch


class ReplayConfig(Section):
    """Samples of earlier steps that are learnt from again, beside each step's new ones. They stay in the groups they
    were drawn in. The ratio of the policy loss is that to the policy which drew them."""

    buffer_prompts: PositiveInt  # prompts kept, each with its samples, in rank 0's host memory; the oldest go first
    prompts_per_step: PositiveInt  # of these, drawn at random; none while there are fewer
    max_age_steps: PositiveInt | None = None  # older ones go; null: at any age
