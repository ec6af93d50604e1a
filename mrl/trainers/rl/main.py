"""The loop of PPO, GRPO and their kin, from the first step that is left to the last, or step by step."""

from __future__ import annotations

import contextlib
import time

from mrl.core import Rollout, StepStats
from mrl.trainers.rl import loop
from mrl.trainers.rl.adapters import AdaptersRun, open_adapters_run
from mrl.trainers.rl.run import RLRun, open_rl_run
from mrl.trainers.shared.loop import Loop


class RLLoop(Loop[RLRun | AdaptersRun]):
    """`step` is a whole step. `generate`, `learn` and `sync_weight` are its parts, for loops of a user's own."""

    _generated: tuple[Rollout, StepStats, float] | None = None  # by `generate`, with the time when it began

    def open(self) -> contextlib.AbstractContextManager[RLRun | AdaptersRun]:
        return open_adapters_run(self.cfg) if self.cfg.adapters else open_rl_run(self.cfg)

    def before_steps(self) -> None:
        run = self.run
        if run.start_step:
            return
        if isinstance(run, AdaptersRun):
            run.validate_at_start()
        elif run.cfg.validation.at_start:
            loop.validate(run, 0)

    def step(self, step: int) -> StepStats:
        return self.run.train_step(step) if isinstance(self.run, AdaptersRun) else loop.train_step(self.run, step)

    @property
    def _one(self) -> RLRun:
        """The run of one policy. Raises ValueError if it trains several adapters."""
        if isinstance(self.run, AdaptersRun):
            raise ValueError(
                "`adapters` trains several policies, whose steps have no parts: call train_step() or fit()"
            )
        return self.run

    def generate(self) -> Rollout:
        """Returns the scored samples of the next step, by the weights that the engines have."""
        run, began = self._one, time.monotonic()
        stats = run.checkpointer.new_stats(self.num_steps + 1)
        rollout = loop.generate(run, self.num_steps, stats)
        self._generated = rollout, stats, began
        return rollout

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Makes all updates of a step from these samples and logs it; returns its metrics. The engines keep their
        weights, and nothing is saved or validated."""
        run, step = self._one, self.num_steps
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
        loop.publish(self._one, self.num_steps - 1, stats)
        return stats.metrics

    def validation(self) -> dict[str, float]:
        run = self._one
        if run.cfg.data.validation is None:
            return super().validation()
        stats = StepStats(self.num_steps)
        loop.validate(run, self.num_steps, stats)
        return stats.metrics
