"""The loop of every trainer on one rank: `mrl train` and the classes of `mrl.api` both run it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from mrl.core import StepStats
from mrl.trainers.shared.callbacks import Callbacks, TrainerCallback, TrainerState
from mrl.trainers.shared.run import TrainingLoop

R = TypeVar("R", bound=TrainingLoop)


class Loop(Generic[R]):
    """A trainer's loop. Every method is collective. A subclass defines `open` and `step`.

    run: what `open` yields, from `init_workers` on
    num_steps: number of completed steps
    """

    run: R

    def __init__(self, cfg: Any, callbacks: Iterable[TrainerCallback] = ()) -> None:
        self.cfg, self._callbacks, self._stack = cfg, callbacks, contextlib.ExitStack()
        self.num_steps = 0

    def open(self) -> contextlib.AbstractContextManager[R]:
        """Builds the run, resumed from its last checkpoint, and closes it."""
        raise NotImplementedError

    def before_steps(self) -> None:
        """Does what comes before the first step of `fit`."""

    def step(self, step: int) -> StepStats:
        """Trains step number `step`, from 0, and logs its metrics."""
        raise NotImplementedError

    def validation(self) -> dict[str, float]:
        """Returns the metrics of the held-out rows. Raises ValueError without any."""
        raise ValueError("data.validation is not set, or not read by this trainer: there is nothing to validate on")

    def init_workers(self) -> Self:
        """Joins the world and builds models, engines and data."""
        self.run = run = self._stack.enter_context(self.open())
        self.num_steps = run.start_step
        state = TrainerState(run.start_step, run.cfg.run.last_step, run.run_dir, run.world.is_main)
        run.set_callbacks(Callbacks(self._callbacks, state))
        return self

    def fit(self) -> None:
        """Trains to the last step and writes the exports asked for."""
        run = self.run
        run.start_step = self.num_steps
        run.callbacks("on_train_begin")
        self.before_steps()
        for step in run.steps():
            self._report_saved()
            self.end_step(self.step(step))
        run.finish()
        self._report_saved()
        run.callbacks("on_train_end")

    def train_step(self) -> dict[str, float]:
        """Trains one step and returns its metrics; saves nothing."""
        return self.end_step(self.step(self.num_steps))

    def end_step(self, stats: StepStats) -> dict[str, float]:
        """Counts a step; returns its metrics."""
        run, self.num_steps = self.run, stats.step
        run.callbacks("on_step_end", stats.metrics, step=stats.step)
        run.checkpointer.is_stopped |= run.callbacks.want_to_stop(run.world)
        return stats.metrics

    def save_checkpoint(self, save_as_hf: bool = False) -> Path:
        """Saves a checkpoint of the completed steps and returns its path once it is complete. save_as_hf: also exports
        the weights."""
        path = self.run.checkpointer.save(self.num_steps, export=save_as_hf)
        self._report_saved()
        return path

    def __enter__(self) -> Self:
        return self.init_workers()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def _report_saved(self) -> None:
        for path in self.run.checkpointer.take_written():
            self.run.callbacks("on_save", path)
