"""An RLRun that has only learners, for `trainers.rl.update`. Install the platform before importing this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.algo.kl import FixedController
from mrl.config.schema import MismatchConfig, RLConfig
from mrl.learner import Learner
from mrl.observe import SilentRecorder
from mrl.trainers.rl.mismatch import MismatchLimits
from mrl.trainers.rl.models import Models
from mrl.trainers.rl.passes import StepPasses
from mrl.trainers.rl.run import RLRun
from mrl.trainers.shared.memory import PhaseMemoryManager
from mrl.trainers.shared.updates import Updates

NO_LIMITS = MismatchConfig(warn=None, stop=None, warn_sample=None, stop_sample=None)  # the samples are made up


def passes_of(cfg: RLConfig, models: Models) -> StepPasses:
    """Returns the passes over whole steps."""
    return StepPasses.make(cfg, models, lambda part: None)


def bare_run(cfg: RLConfig, actor: Learner, critic: Learner | None) -> RLRun:
    recorder = SilentRecorder()
    fields = RLRun.__dataclass_fields__.items()
    nothing: dict[str, Any] = dict.fromkeys(name for name, field in fields if field.init)
    return RLRun(
        **nothing
        | {
            "cfg": cfg,
            "recorder": recorder,
            "actor": actor,
            "critic": critic,
            "memory": PhaseMemoryManager(),
            "passes": passes_of(cfg, Models(actor, critic, None, None, None)),
            "kl_controller": FixedController(cfg.algorithm.kl.coef),
            "updates": Updates(Path(), 3, recorder, writes=False),
            "mismatch": MismatchLimits(NO_LIMITS, recorder.note),
        }
    )
