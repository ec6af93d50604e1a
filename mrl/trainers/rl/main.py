"""A run of PPO, GRPO and their kin, from the first step that is left to the last."""

from __future__ import annotations

from mrl.config.schema import RLConfig
from mrl.trainers.rl import loop, overlapped
from mrl.trainers.rl.run import open_rl_run


def main(cfg: RLConfig) -> None:
    """Trains to `run.steps`, going on from the run directory's last checkpoint. Called on every rank."""
    with open_rl_run(cfg) as run:
        if run.start_step == 0 and cfg.validation.at_start:
            loop.validate(run, 0)
        (overlapped if cfg.rollout.overlap == "one_step" else loop).train(run)
        run.finish()
