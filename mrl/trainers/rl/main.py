"""The loop of PPO, GRPO and their kin, from the first step that is left to the last, or step by step."""

from __future__ import annotations

import contextlib
import time

from mrl.core import Rollout, StepStats
from mrl.trainers.rl import loop
from mrl.trainers.rl.run import RLRun, open_rl_run
from mrl.trainers.shared.loop import Loop


class RLLoop(Loop[RLRun]):
    """`step` is a whole step. `generate`, `learn` and `sync_weight` are its parts, for loops of a user's own."""

    _generated: tuple[Rollout, StepStats, float] | None = None  # by `generate`, with the time when it began

    def open(self) -> contextlib.AbstractContextManager[RLRun]:
        return open_rl_run(self.cfg)

    def before_steps(self) -> None:
        run = self.run
        if run.start_step == 0 and run.cfg.validation.at_start:
            loop.validate(run, 0)

    def step(self, step: int) -> StepStats:
        return loop.train_step(self.run, step)

    def generate(self) -> Rollout:
        """Returns the scored samples of the next step, by the weights that the engines have."""
        began, stats = time.monotonic(), self.run.checkpointer.new_stats(self.num_steps + 1)
        rollout = loop.generate(self.run, self.num_steps, stats)
        self._generated = rollout, stats, began
        return rollout

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Makes all updates of a step from these samples and logs it; returns its metrics. The engines keep their
        weights, and nothing is saved or validated."""
        run, step = self.run, self.num_steps
        generated, stats, began = self._generated or (None, run.checkpointer.new_stats(step + 1), time.monotonic())
        if generated is None or rollout.tokens is not generated.tokens:
            run.passes.begin()  # forgets what was computed early, of other samples
        self._generated = None
        experience = loop.learn(run, step, rollout, stats)
        seconds = time.monotonic() - began
        stats.metrics |= run.speed.metrics(stats, experience.rollout, rollout.num_response_tokens, seconds)
        run.phase.end_of_step(stats)
        run.recorder.log(stats)
        return self.end_step(stats)

    def sync_weight(self) -> dict[str, float]:
        """Gives the engines the weights of the last step; returns the sync's metrics."""
        stats = StepStats(self.num_steps)
        loop.publish(self.run, self.num_steps - 1, stats)
        return stats.metrics

    def validation(self) -> dict[str, float]:
        if self.run.cfg.data.validation is None:
            return super().validation()
        stats = StepStats(self.num_steps)
        loop.validate(self.run, self.num_steps, stats)
        return stats.metrics
