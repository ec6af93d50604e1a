"""Checkpoint schedule, failed saves and resuming, shared by all trainers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from mrl import checkpoint
from mrl.checkpoint import Checkpointable, CheckpointError, SavedCheckpoint, Saver
from mrl.config import resume
from mrl.config.schema import AnyConfig, Config
from mrl.core import StepStats
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy
from mrl.observe import (
    Recorder,
    RunDir,
    is_of_this_launch,
    move_aside,
    record_launch,
    refuse_existing,
    rewind,
    trackers,
    written_files,
)
from mrl.resilience import preemption
from mrl.resilience.protocol import attempt, started_by_torchelastic
from mrl.trainers.shared.best_validation import BestValidation
from mrl.trainers.shared.exports import AdapterExports, Exports
from mrl.trainers.shared.hub import push_to_hub
from mrl.trainers.shared.phases import Phases
from mrl.trainers.shared.updates import Updates
from mrl.weights.errors import WeightError

MIB = 1 << 20


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and plain values that nobody changes in place."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class CombinedState:
    """Several kept states whose keys are disjoint."""

    def __init__(self, *kept: Stateful) -> None:
        self._kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {key: value for each in self._kept for key, value in each.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each in self._kept:
            each.load_state_dict(state)


class WeightExporter(Protocol):
    """Exports of the weights after `step` steps. Every method is collective."""

    def of_step(self, step: int) -> None: ...

    def whole(self, name: str, step: int) -> None: ...

    def adapter(self, name: str, step: int) -> None: ...


def open_run_dir(cfg: AnyConfig, run_dir: Path, stack: ExitStack) -> Recorder:
    """Takes ownership of the run directory on rank 0, before anything is started.

    Files of a run without a checkpoint are moved aside, never overwritten, except by a restart of the same launch.
    Raises ConfigChanged if the configuration cannot resume the directory's checkpoint.
    """
    notes: list[str] = []

    def check() -> None:
        found = checkpoint.latest(run_dir)
        if found is not None:
            stored = checkpoint.read(found)[1]
            changes = resume.check_resume(stored, cfg, found)
            notes.extend(f"changed since the checkpoint: {change}" for change in changes)
            notes.extend(resume.unknown(stored, cfg))
        elif not (attempt() and is_of_this_launch(run_dir)):  # an earlier attempt may have failed before this line
            refuse_existing(cfg)
            if written_files(run_dir):
                notes.append(f"moved the files of an earlier run without a checkpoint to {move_aside(run_dir)}")

    stack.enter_context(RunDir.open(cfg, check))
    if started_by_torchelastic():
        record_launch(run_dir)
    preemption.begin(run_dir)
    on_error = cfg.checkpoint.on_error
    recorder = stack.enter_context(Recorder(run_dir, cfg.run.steps, trackers.make(cfg, run_dir), on_error=on_error))
    for note in notes:
        recorder.note(note)
    return recorder


class Checkpointer:
    """The checkpoints of one run. Construction and all methods but `close` are collective.

    parts: the trained models and copies of their weights by name, "actor" or several adapters among them
    states: JSON state of the loop besides `updates`, by name
    kept: state of rank 0 alone
    best: the best validation so far, None without validations
    exports: writes the Hugging Face exports; None: exports of the actor, or of the adapters
    end_tokens: stop tokens that a part learns; rank 0's count
    """

    def __init__(
        self,
        cfg: AnyConfig,
        phase: Phases,
        parts: Mapping[str, Checkpointable],
        updates: Updates,
        states: Mapping[str, Stateful],
        kept: Stateful | None = None,
        best: BestValidation | None = None,
        exports: WeightExporter | None = None,
        end_tokens: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self._cfg, self._phase, self._recorder, self._run_dir = cfg, phase, phase.recorder, phase.run_dir
        self._parts, self._updates, self._kept, self._best = parts, updates, kept, best
        self._states = {**states, **({"best": best} if best is not None else {})}
        self._saver = Saver(self._run_dir, cfg.checkpoint, self._note_written)
        self._config = self._from_main("reading the run's configuration and inputs", lambda: resume.snapshot(cfg))
        self._end_tokens = end_tokens
        self._exports = exports or self._of_actors(end_tokens)
        self._since_row = StepStats(0)
        self._step = 0  # steps done by the learners
        self._written: list[Path] = []
        self.is_stopped = False  # a callback ends the run after this step
        self._best_saved: int | None = None  # step of the best validation when the last save began

    def resume(self) -> int:
        """Resumes from the newest complete checkpoint; returns its step, 0 if there is none.

        Metrics and samples after that step are dropped, since those steps run again.
        """
        path = self._from_main("looking for a checkpoint", lambda: checkpoint.latest(self._run_dir))
        state = checkpoint.load(path, self._parts) if path is not None else None
        if path is not None and self._kept is not None:
            kept = self._kept
            self._from_main(f"restoring {path}", lambda: kept.load_state_dict(checkpoint.load_samples(path)))
        if state is not None:
            self._step = state["step"]
            self._updates.load_state_dict(state)
            self._recorder.resume_runs(state.get("trackers", {}))
            self._load_states(state)
        dropped = self._from_main("dropping later metrics and samples", lambda: rewind(self._run_dir, self._step))
        after = f"; dropped what was written after it: {dropped}" if dropped else ""
        if path is not None:
            left = max(0, self._cfg.run.last_step - self._step)
            more = "run.profile.steps" if self._cfg.run.is_for_profile else "run.steps"
            to_do = f"{left} steps left" if left else f"no steps left: raise {more} to continue training"
            to_do = "stopped early: raise validation.patience to continue training" if self.is_over else to_do
            self._recorder.note(f"resuming from {path} (step {self._step}), {to_do}{after}")
        elif dropped:
            self._recorder.note(f"no complete checkpoint: starting from step 0; dropped: {dropped}")
        return self._step

    def new_stats(self, step: int) -> StepStats:
        """Returns the stats of step `step`, with the seconds that saving has taken since the previous row."""
        stats, self._since_row = self._since_row, StepStats(0)
        stats.step = step
        return stats

    def after_step(self, step: int) -> None:
        """Saves what is due after `step` steps. The caller has written the step's metrics: a checkpoint never covers
        more steps than the metrics do."""
        self._step = step
        cfg = self._cfg.effective_checkpoint
        last = step == self._cfg.run.steps or self.is_over or self.is_stopped
        is_best = self._best is not None and self._best.kept_step == step
        self._attempt(self._saver.poll)
        if cfg.every_steps and (step % cfg.every_steps == 0 or last or is_best):
            with self._phase("checkpoint", self._since_row):
                self._attempt(self._saver.wait)
                self._attempt(self._save)
        if cfg.weights_every_steps and step % cfg.weights_every_steps == 0:
            with self._phase("checkpoint", self._since_row):
                self._attempt(lambda: self._exports.of_step(step))

    def save(self, step: int, export: bool = False) -> Path:
        """Saves a checkpoint of `step` steps, complete on return; returns its path. export: writes weights like
        checkpoint.weights_every_steps"""
        self._step, path = step, checkpoint.step_path(self._run_dir, step)
        with self._phase("checkpoint", self._since_row):
            self._saver.wait()
            if step == 0 or self._newest() != step:
                self._save()
                self._saver.wait()
            if export:
                self._exports.of_step(step)
        return path

    def take_written(self) -> list[Path]:
        """Returns the checkpoints that were completed since the last call."""
        written, self._written = self._written, []
        return written

    def save_now(self, deadline_s: float) -> int:
        """Saves between two steps and returns the step that a restart resumes from.

        That step is the newest, unless saving it takes longer than `deadline_s`; a note then gives the reason.
        """
        end = time.monotonic() + deadline_s
        with self._phase("checkpoint", self._since_row):
            problem = self._try(lambda: self._saver.wait(deadline_s))
            if not self._saver.is_writing and self._step != self._newest():
                problem = self._try(self._save) or self._try(lambda: self._saver.wait(max(0.0, end - time.monotonic())))
            newest = self._newest()
        if problem:
            self._recorder.note(f"step {self._step} is not saved: {problem}")
        return newest

    @property
    def is_over(self) -> bool:
        """True if early stopping ends the run before its last step."""
        return self._best is not None and self._best.is_over

    def finish(self) -> None:
        """Waits until the last checkpoint is complete, then writes the exports asked for: RUN_DIR/hf, adapter, hf_ema
        and hf_best. For hf_best the learners load the best weights. Then uploads RUN_DIR/hf if that is asked for."""
        with self._phase("checkpoint", self._since_row):
            self._attempt(self._saver.wait)
            if self._cfg.effective_checkpoint.export_hf:
                self._exports.whole("hf", self._step)
                self._exports.adapter("adapter", self._step)
                if isinstance(average := self._parts.get("ema"), PolicyCopy):  # the exported actor's average
                    with average.in_place():
                        self._exports.whole("hf_ema", self._step)
                if self._best is not None and self._best.kept_step is not None:
                    self._save_best(self._best.kept_step)
                self._push_to_hub()

    def _push_to_hub(self) -> None:
        cfg, active = self._cfg.checkpoint, self._phase.world.activity.note
        if cfg.push_to_hub is not None:
            self._recorder.note(f"uploading {self._run_dir / 'hf'} to {cfg.push_to_hub}")
            done = self._from_main("the upload to the hub", lambda: push_to_hub(self._run_dir / "hf", cfg, active))
            self._recorder.note(done)

    def close(self) -> None:
        """Gives a save in progress time to complete, after a failure too."""
        self._saver.close()

    def _save(self) -> None:
        states = {name: each.state_dict() for name, each in self._states.items()}
        trackers = {"trackers": self._recorder.tracker_runs()}
        ends = {"end_tokens": {name: sorted(tokens) for name, tokens in self._end_tokens.items()}}
        state = {"step": self._step, **states, **self._updates.state_dict(), **trackers, **ends, **self._config}
        kept = self._kept.state_dict() if self._kept is not None else None
        self._best_saved = self._best.kept_step if self._best is not None else None
        self._saver.save(self._step, self._parts, state, kept, self._best_saved)

    def _save_best(self, step: int) -> None:
        """Exports the best weights, which are the run's last ones or a checkpoint's."""
        said, kept = f"best validation: {self._best}", step if step == self._step else self._load_best(step)
        if kept is None:
            self._recorder.note(f"{said}; no weights saved: its checkpoint, or an earlier best one, was not written")
            return
        whose = "its weights" if kept == step else f"its checkpoint was not written; the weights of step {kept}"
        self._recorder.note(f"{said}; {whose} are in {self._run_dir / 'hf_best'}")
        self._exports.whole("hf_best", kept)
        self._exports.adapter("adapter_best", kept)

    def _load_best(self, step: int) -> int | None:
        """Loads the best checkpoint into the learners; returns its step, None if there is no such checkpoint."""
        path = checkpoint.step_path(self._run_dir, step)
        found = self._from_main(f"looking for {path}", lambda: checkpoint.best_of(path))
        if found is None:
            return None
        checkpoint.load(found, self._parts)
        return checkpoint.step_number(found)

    def _load_states(self, state: Mapping[str, Any]) -> None:
        for name, each in self._states.items():
            if name in state:
                each.load_state_dict(state[name])
            else:
                self._recorder.note(f"the checkpoint has no state of {name!r}: it starts from its initial state")
        if self._best is not None and self._best.kept_step is not None:
            self._name_best(self._best.kept_step)

    def _name_best(self, step: int) -> None:
        """Marks the checkpoint of `step` as the best, if it exists."""
        path = checkpoint.step_path(self._run_dir, step)
        if self._phase.world.is_main and checkpoint.best_of(path) == path:
            self._recorder.write_guarded("checkpoints/best", lambda: checkpoint.link_best(self._run_dir, step))

    def _of_actors(self, end_tokens: Mapping[str, Collection[int]]) -> WeightExporter:
        cfg, actor = self._cfg, self._parts.get("actor")
        assert isinstance(cfg, Config)
        if isinstance(actor, Learner):
            return Exports(cfg, self._phase, self._config, actor, end_tokens.get("actor", ()))
        learners = {name: part for name, part in self._parts.items() if isinstance(part, Learner)}
        return AdapterExports(cfg, self._phase, self._config, learners, end_tokens)

    def _newest(self) -> int:
        path = self._from_main("looking for a checkpoint", lambda: checkpoint.latest(self._run_dir))
        return checkpoint.step_number(path) if path is not None else 0

    def _attempt(self, action: Callable[[], None]) -> None:
        """Runs a save; its failure ends the run, or is counted and reported, as configured."""
        if self._cfg.checkpoint.on_error == "stop":
            action()
        elif problem := self._try(action):
            failed = self._since_row.metrics.get("checkpoint/failed", 0.0)
            self._since_row.metrics["checkpoint/failed"] = failed + 1
            self._recorder.note(f"not saved, training continues (checkpoint.on_error: warn): {problem}")

    def _try(self, action: Callable[[], None]) -> str | None:
        try:
            action()
        except (CheckpointError, WeightError) as error:
            return str(error)
        return None

    def _note_written(self, done: SavedCheckpoint) -> None:
        self._written.append(done.path)
        self._since_row.metrics |= {"checkpoint/copy_s": done.copy_s, "checkpoint/write_s": done.write_s}
        size, meanwhile = f"{done.nbytes / MIB:.1f} MiB", " in the background" * self._cfg.checkpoint.asynchronous
        self._recorder.note(f"{done.path} is complete: {size} written in {done.write_s:.2f} s{meanwhile}")
        if self._best_saved == checkpoint.step_number(done.path):
            self._name_best(self._best_saved)

    def _from_main(self, what: str, make: Callable[[], Any]) -> Any:
        return self._phase.world.from_main(what, make)
