"""An RLRun with learners and nothing else, for `trainers.rl.update`. Install the platform before importing it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mrl.algo.kl import FixedController
from mrl.config.schema import RLConfig
from mrl.learner import Learner
from mrl.observe import SilentRecorder
from mrl.trainers.nonfinite import Updates
from mrl.trainers.setup import RLRun


def bare_run(cfg: RLConfig, actor: Learner, critic: Learner | None) -> RLRun:
    recorder = SilentRecorder()
    nothing: dict[str, Any] = dict.fromkeys(RLRun.__dataclass_fields__)
    return RLRun(
        **nothing
        | {
            "cfg": cfg,
            "recorder": recorder,
            "actor": actor,
            "critic": critic,
            "kl_controller": FixedController(0.0),
            "updates": Updates(Path(), 3, recorder, writes=False),
        }
    )
