"""Classes of every section of a YAML file, typed and frozen. Names of sizes and times end with their unit.

The loader (`mrl.config.loader`) turns YAML into these classes and reports every mistake at once with file and line.
Rules between keys are in `mrl.config.checks`.
"""

# ruff: noqa: F401 - other modules take the classes from here

from __future__ import annotations

from mrl.config.sections.agent import AgentConfig
from mrl.config.sections.algorithm import AlgorithmConfig, FilterGroupsConfig, KLConfig, PFPPOConfig, ValueLossConfig
from mrl.config.sections.data import (
    BatchConfig,
    DataConfig,
    Form,
    HeldOutConfig,
    PreferenceDataConfig,
    RewardDataConfig,
    SFTDataConfig,
    SourceConfig,
)
from mrl.config.sections.lora import LoRAConfig
from mrl.config.sections.models import ModelConfig, MuonConfig, OptimizerConfig, ParallelConfig, RefConfig, TrainConfig
from mrl.config.sections.placement import PlacementConfig
from mrl.config.sections.policy import PolicyLossConfig, RolloutCorrectionConfig
from mrl.config.sections.precision import FP8Config, PrecisionConfig
from mrl.config.sections.reuse import EMAConfig, ReplayConfig
from mrl.config.sections.reward import CodeConfig, FormatConfig, RewardConfig, RewardModelConfig, ServerConfig
from mrl.config.sections.reward_model import RewardModelTrainingConfig
from mrl.config.sections.rollout import (
    DeltaSyncConfig,
    MismatchConfig,
    RolloutConfig,
    SamplingConfig,
    SyncConfig,
    ValidationConfig,
)
from mrl.config.sections.run import CheckpointConfig, ResilienceConfig, RunConfig, SectionTimeouts
from mrl.config.sections.sft import PackingConfig
from mrl.config.sections.teacher import TeacherConfig
from mrl.config.trainers.base import AnyConfig, Config
from mrl.config.trainers.dpo import DPOConfig
from mrl.config.trainers.preferences import PreferencesConfig
from mrl.config.trainers.reward_model import RewardModelTrainerConfig
from mrl.config.trainers.rl import RLConfig
from mrl.config.trainers.sft import SFTConfig
from mrl.options.base import Section
