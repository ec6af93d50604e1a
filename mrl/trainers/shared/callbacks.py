"""Callbacks of a run, by the convention of transformers."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.trainers.shared.world import World


class CallbackError(RuntimeError):
    """A callback raised an exception; the message names the callback, its method and the step."""


@dataclass
class TrainerState:
    """State of a run, for callbacks.

    step: number of completed steps
    total_steps: number of steps of the whole run
    run_dir: the run directory
    is_main: True on rank 0
    should_stop: a callback sets it to True to end the run after the current step; one rank suffices
    adapter: of several adapters, the one whose rollout or validation a callback gets; else empty
    """

    step: int = 0
    total_steps: int = 0
    run_dir: Path = field(default_factory=Path)
    is_main: bool = True
    should_stop: bool = False
    adapter: str = ""


class TrainerCallback:
    """Base class of callbacks. Each method does nothing by default, and is called on every rank.

    An exception in a method ends the run with an error that names the class, the method and the step.
    """

    def on_train_begin(self, state: TrainerState) -> None:
        """Called before the first step of this launch."""

    def on_rollout(self, state: TrainerState, rollout: Any) -> None:
        """Called when the samples of a step are generated and scored.

        Args:
            rollout: an `mrl.core.Rollout`, equal on every rank; with trainer ddpo an `mrl.diffusion.ddpo.StepSamples`
        """

    def on_step_end(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
        """Called after each step.

        Args:
            metrics: the row of metrics.jsonl, by name; times and metrics of the engines are those of rank 0
        """

    def on_evaluate(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
        """Called after each validation.

        Args:
            metrics: the metrics so far; those of the validation begin with `validation`
        """

    def on_save(self, state: TrainerState, path: Path) -> None:
        """Called once the checkpoint `path` is complete, which may be steps after the step that it holds."""

    def on_train_end(self, state: TrainerState) -> None:
        """Called after the last step, with all checkpoints and exports written."""


class Callbacks:
    """Calls the callbacks of a run in their order."""

    def __init__(self, callbacks: Iterable[TrainerCallback] = (), state: TrainerState | None = None) -> None:
        self._callbacks, self.state = tuple(callbacks), state or TrainerState()

    def __call__(self, method: str, *arguments: Any, step: int | None = None) -> None:
        """Calls a method of each callback. step: completed steps, if their number has changed."""
        self.state.step = self.state.step if step is None else step
        for callback in self._callbacks:
            try:
                getattr(callback, method)(self.state, *arguments)
            except Exception as error:
                what = " ".join("".join(traceback.format_exception_only(error)).split())
                raise CallbackError(
                    f"{type(callback).__name__}.{method} failed at step {self.state.step}: {what}"
                ) from error

    def want_to_stop(self, world: World) -> bool:
        """True if a callback of any rank has asked the run to stop. Collective if there are callbacks."""
        return bool(self._callbacks) and world.any(self.state.should_stop)
