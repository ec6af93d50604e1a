"""Runs with validation on held-out rows: before the first step, every N steps, and after the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from mrl.core import StepStats
from mrl.trainers.shared.best_validation import BestValidation
from mrl.trainers.shared.loop import Loop
from mrl.trainers.shared.run import Run


@dataclass
class ValidatedRun(Run):
    """A run with held-out rows. best: the best validation; None without held-out rows."""

    best: BestValidation | None

    def validate(self) -> dict[str, float]:
        """Returns the validation/... metrics of the held-out rows, validation/loss among them. Collective."""
        raise NotImplementedError

    def before_steps(self) -> None:
        """Validates at step 0 if a validation is due and has not been made. Collective."""
        cfg = self.cfg.held_out()
        if self.best is not None and self.start_step == 0 and cfg is not None and cfg.at_start:
            stats = StepStats(0)
            self.add_validation(stats)
            self.recorder.log(stats)

    def after_update(self, stats: StepStats) -> None:
        """Validates if a validation is due after the step of `stats`, and adds its metrics. Collective if due."""
        cfg = self.cfg.held_out()
        if self.best is None or cfg is None:
            return
        if stats.step % cfg.every_steps == 0 or stats.step == self.cfg.run.steps:
            self.add_validation(stats)
            self.best.record(stats.step, stats.metrics)

    def finish(self) -> None:
        if self.best is not None and self.checkpointer.is_over:
            self.recorder.note(f"early stop: no improvement in {self.best.stalled} validations (best: {self.best})")
        super().finish()

    def add_validation(self, stats: StepStats) -> None:
        """Validates and adds the metrics to those of the step. Collective."""
        with self.phase("validation", stats):
            stats.metrics |= self.validate()
        self.callbacks("on_evaluate", stats.metrics, step=stats.step)
        self.speed.leave_out()


V = TypeVar("V", bound=ValidatedRun)


class ValidatedLoop(Loop[V]):
    """The loop of a run with held-out rows."""

    def before_steps(self) -> None:
        self.run.before_steps()

    def validation(self) -> dict[str, float]:
        if self.run.best is None:
            return super().validation()
        stats = StepStats(self.num_steps)
        self.run.add_validation(stats)
        return stats.metrics
