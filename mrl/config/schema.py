"""Every key a YAML file can hold, typed and frozen. Sizes carry their unit in the name.

The loader (`mrl.config.loader`) turns YAML into these classes and reports every mistake at once with file and line;
cross-field rules live in `mrl.config.checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from mrl.config.sections.algorithm import (
    Algorithm,
    AlgorithmConfig,
    FilterGroupsConfig,
    KLConfig,
    PFPPOConfig,
    ValueLossConfig,
)
from mrl.config.sections.base import Section
from mrl.config.sections.data import BatchConfig, DataConfig, SFTBatchConfig, SourceConfig, Sources
from mrl.config.sections.models import (
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RefConfig,
    TrainConfig,
)
from mrl.config.sections.policy import (
    PolicyLossConfig,
    RolloutCorrectionConfig,
)
from mrl.config.sections.reuse import EMAConfig, PTXConfig, ReplayConfig
from mrl.config.sections.reward import (
    CodeConfig,
    FormatConfig,
    LengthConfig,
    OverlongConfig,
    RewardConfig,
    RewardModelConfig,
    ServerConfig,
)
from mrl.config.sections.rollout import MismatchConfig, RolloutConfig, SamplingConfig, SyncConfig, ValidationConfig
from mrl.config.sections.run import CheckpointConfig, ResilienceConfig, RunConfig, SectionTimeouts
from mrl.options.losses import AggMode

__all__ = [
    "AggMode",
    "AlgorithmConfig",
    "BatchConfig",
    "CheckpointConfig",
    "CodeConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EMAConfig",
    "FilterGroupsConfig",
    "FormatConfig",
    "KLConfig",
    "LengthConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "PFPPOConfig",
    "PTXConfig",
    "ParallelConfig",
    "PolicyLossConfig",
    "RLConfig",
    "RefConfig",
    "ReplayConfig",
    "ResilienceConfig",
    "RewardConfig",
    "RewardModelConfig",
    "MismatchConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SCHEMAS",
    "SFTBatchConfig",
    "SFTConfig",
    "SamplingConfig",
    "Schema",
    "Section",
    "SectionTimeouts",
    "ServerConfig",
    "SourceConfig",
    "Sources",
    "SyncConfig",
    "TrainConfig",
    "ValidationConfig",
    "ValueLossConfig",
]


class RLConfig(Section):
    """`trainer: rl`: PPO, GRPO and their kin."""

    trainer: Literal["rl"]  # PPO, GRPO and their kin
    run: RunConfig
    model: ModelConfig
    actor: TrainConfig = TrainConfig()  # The model that is trained: its layout and optimizer
    critic: CriticConfig | None = None
    ref: RefConfig = RefConfig()
    ema: EMAConfig | None = None
    data: DataConfig
    batch: BatchConfig
    rollout: RolloutConfig = RolloutConfig()
    sync: SyncConfig = SyncConfig()
    reward: RewardConfig
    algorithm: Algorithm
    replay: ReplayConfig | None = None
    ptx: PTXConfig | None = None
    validation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resilience: ResilienceConfig = ResilienceConfig()


class SFTConfig(Section):
    """`trainer: sft`: supervised fine-tuning on prompt + answer; the loss is the mean over answer tokens."""

    trainer: Literal["sft"]  # supervised fine-tuning
    run: RunConfig
    model: ModelConfig
    actor: TrainConfig = TrainConfig()  # The model that is trained: its layout and optimizer
    data: DataConfig
    batch: SFTBatchConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    resilience: ResilienceConfig = ResilienceConfig()


Config = RLConfig | SFTConfig
Schema = type[RLConfig] | type[SFTConfig]
SCHEMAS: Mapping[str, Schema] = {"rl": RLConfig, "sft": SFTConfig}  # by `trainer`
