"""Sections `ema`, `ptx` and `replay`."""

from __future__ import annotations

from mrl.config.sections.data import DataConfig
from mrl.options.base import InnerFraction, PositiveFloat, PositiveInt, Section


class EMAConfig(Section):
    """A moving average of the actor's weights, float32 and sharded like its optimizer. After every update
    average <- decay * average + (1 - decay) * actor. `checkpoint.export_hf` writes it too, to RUN_DIR/hf_ema."""

    decay: InnerFraction = 0.992  # decay of the average per update
    offload: bool = True  # keep it in host memory; false: on the device
    in_validation: bool = False  # also validate with the average (two more weight syncs)


class PTXConfig(Section):
    """Demonstrations in every update of the actor (PPO-ptx, arXiv 2203.02155).

    Adds to the actor's loss: coef * mean of -log p over the answers' tokens, at temperature 1.
    """

    data: DataConfig  # prompts and answers
    coef: PositiveFloat  # weight of the loss of the demonstrations
    samples_per_update: PositiveInt  # demonstrations per update


class ReplayConfig(Section):
    """Replay buffer: trains on samples of earlier steps (off-policy) in addition to the new ones.

    The samples of a prompt stay in one group. The ratio of the policy loss is to the policy that generated them.
    """

    buffer_prompts: PositiveInt  # prompts kept with their samples in rank 0's host memory; the oldest are dropped first
    prompts_per_step: PositiveInt  # prompts replayed per step, chosen at random; none while the buffer has fewer
    max_age_steps: PositiveInt | None = None  # drop prompts that are older; null: no limit
