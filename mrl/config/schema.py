"""Every key a YAML file can hold, typed and frozen. Sizes carry their unit in the name.

The loader (`mrl.config.loader`) turns YAML into these classes and reports every mistake at once with file and line;
cross-field rules live in `mrl.config.checks`.
"""

from __future__ import annotations

from mrl.config.sections.algorithm import AlgorithmConfig, FilterGroupsConfig, KLConfig, PFPPOConfig, ValueLossConfig
from mrl.config.sections.base import Section
from mrl.config.sections.data import (
    BatchConfig,
    DataConfig,
    PreferenceBatchConfig,
    PreferenceDataConfig,
    SFTBatchConfig,
    SourceConfig,
    Sources,
)
from mrl.config.sections.models import (
    CriticConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RefConfig,
    TrainConfig,
)
from mrl.config.sections.placement import PlacementConfig
from mrl.config.sections.policy import (
    PolicyLossConfig,
    RolloutCorrectionConfig,
)
from mrl.config.sections.precision import FP8Config, PrecisionConfig
from mrl.config.sections.preference import LossesConfig, PreferenceConfig, PreferenceRefConfig
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
from mrl.config.trainers.base import Config
from mrl.config.trainers.dpo import DPOConfig
from mrl.config.trainers.rl import RLConfig
from mrl.config.trainers.sft import SFTConfig
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
    "DPOConfig",
    "EMAConfig",
    "FP8Config",
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
    "PlacementConfig",
    "PrecisionConfig",
    "PolicyLossConfig",
    "LossesConfig",
    "PreferenceBatchConfig",
    "PreferenceConfig",
    "PreferenceDataConfig",
    "PreferenceRefConfig",
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
    "SFTBatchConfig",
    "SFTConfig",
    "SamplingConfig",
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
