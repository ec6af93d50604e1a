"""Section `adapters`: several LoRA adapters of one base model, trained in one run."""

from __future__ import annotations

from mrl.config.sections.agent import AgentConfig
from mrl.config.sections.algorithm import Algorithm
from mrl.config.sections.data import BatchConfig, DataConfig
from mrl.config.sections.lora import LoRAConfig
from mrl.config.sections.models import OptimizerConfig
from mrl.config.sections.reward import RewardConfig
from mrl.config.sections.rollout import SamplingConfig, ValidationConfig
from mrl.options.base import Section


class AdapterConfig(Section):
    """One of several adapters that are trained in one run. It has data, rewards, gradients and an optimizer of its own,
    and becomes, bit for bit, what a run of it alone makes. Each section here replaces the run's section whole.
    """

    data: DataConfig | None = None  # null: the run's
    batch: BatchConfig | None = None  # null: the run's
    reward: RewardConfig | None = None  # null: the run's
    agent: AgentConfig | None = None  # null: the run's
    algorithm: Algorithm | None = None  # null: the run's
    validation: ValidationConfig | None = None  # null: the run's
    sampling: SamplingConfig | None = None  # null: rollout.sampling
    optimizer: OptimizerConfig | None = None  # null: actor.optimizer
    lora: LoRAConfig | None = None  # null: actor.lora
