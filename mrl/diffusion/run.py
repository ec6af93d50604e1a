"""Setup, run state and saving shared by both diffusion trainers; all but the model is as in other trainers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mrl.checkpoint import CheckpointError
from mrl.config.sections.diffusion import SamplerConfig
from mrl.config.trainers.diffusion import DiffusionConfig
from mrl.diffusion import nets
from mrl.diffusion.advantages import PromptStats
from mrl.diffusion.card import card
from mrl.diffusion.learner import DiffusionLearner
from mrl.diffusion.pipeline import Pipeline
from mrl.diffusion.rewards import SamplingErrorCheck
from mrl.directories import Staging
from mrl.trainers.shared.checkpoints import Checkpointer
from mrl.trainers.shared.phases import Phases
from mrl.trainers.shared.run import RunSetup, TrainingLoop
from mrl.trainers.shared.world import RankZeroError
from mrl.weights.errors import WeightError

ERROR_CHECK = SamplingErrorCheck()


class NetState:
    """Checkpoint content: rank 0 writes the trained weights and their optimizer.

    base: digest of the adapters' frozen base weights; empty without adapters
    """

    def __init__(self, learner: DiffusionLearner, base: str) -> None:
        self._learner, self._base = learner, base
        self._read: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state. Collective."""
        return {"base": self._base, **self._learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stores the state on rank 0 for `share`. Raises CheckpointError for the state of another net."""
        if state.get("base", "") != self._base:
            raise CheckpointError(
                "the checkpoint's adapters were trained on other weights than those of model.path: set model.path to "
                "the model that the run started from"
            )
        try:
            self._learner.check_state(state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(str(error)) from error
        self._read = state

    def share(self, is_resumed: bool) -> None:
        """Broadcasts the loaded state, or else rank 0's weights, tensor by tensor. Collective."""
        if is_resumed:
            self._learner.load_state_dict(self._read)
        else:
            self._learner.share()
        self._read = None


class DiffusersExports:
    """Diffusers directories with a card. All methods are collective; `step` is the step of the weights."""

    def __init__(self, phase: Phases, pipeline: Pipeline) -> None:
        self._phase, self._pipeline = phase, pipeline

    def of_step(self, step: int) -> None:
        """Writes RUN_DIR/hf_step_N."""
        self.whole(f"hf_step_{step}", step)

    def whole(self, name: str, step: int) -> None:
        """Writes RUN_DIR/name, with a card."""

        def write(weights: dict[str, Tensor], folder: Path) -> None:
            self._pipeline.save(weights, folder)
            card(self._phase.run_dir, folder, self._phase.run_dir / name, step)

        self._export(name, write)

    def adapter(self, name: str, step: int) -> None:
        """Writes the adapters alone to RUN_DIR/name, if there are any."""
        if self._pipeline.lora is not None:
            self._export(name, lambda weights, target: self._pipeline.save_adapter(weights, target))

    def _export(self, name: str, write: Callable[[dict[str, Tensor], Path], None]) -> None:
        """Writes an export from rank 0. Raises WeightError."""
        target, weights = self._phase.run_dir / name, nets.weights(self._pipeline.net)
        try:
            self._phase.world.from_main(f"writing {name}", lambda: self._write(target, weights, write))
        except RankZeroError as error:
            raise WeightError(str(error)) from error

    def _write(
        self, target: Path, weights: dict[str, Tensor], write: Callable[[dict[str, Tensor], Path], None]
    ) -> None:
        nbytes = sum(weight.numel() * 4 for weight in weights.values())
        staging = Staging(target, nbytes, overwrite=True)
        try:
            staging.begin()
            write(weights, staging.directory)
            staging.commit()
        finally:
            staging.end()


@dataclass
class DiffusionRun(TrainingLoop):
    pipeline: Pipeline
    learner: DiffusionLearner
    kept: NetState

    def resume(self) -> None:
        """Resumes from the newest checkpoint; all ranks start with the same weights in any case. Collective."""
        super().resume()
        self.kept.share(is_resumed=self.start_step > 0)


def begin(
    start: RunSetup, cfg: DiffusionConfig, sampler: SamplerConfig, states: dict[str, PromptStats]
) -> DiffusionRun:
    """Returns a run at its first step, or at its last checkpoint. Collective."""
    pipeline = ERROR_CHECK.together(
        f"loading {cfg.model.path}", lambda: Pipeline.load(cfg.model, cfg.actor, sampler.negative_prompt)
    )
    learner = DiffusionLearner(pipeline.net, cfg.actor.optimizer)
    phase, updates = start.watch(peers=0)
    exports = DiffusersExports(phase, pipeline)
    base = ERROR_CHECK.together(f"reading the weights of {cfg.model.path}", pipeline.base_digest)
    kept = NetState(learner, base)
    checkpointer = Checkpointer(cfg, phase, {}, updates, states, kept, exports=exports)
    start.stack.callback(checkpointer.close)
    run = DiffusionRun(
        *(cfg, start.world, start.run_dir, start.recorder, phase, updates, checkpointer, 0),
        pipeline=pipeline,
        learner=learner,
        kept=kept,
    )
    run.resume()
    return run
