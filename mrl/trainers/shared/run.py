"""Setup, loop state and end of a run, shared by all trainers."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from mrl import failure, platform
from mrl.checkpoint import Checkpointable
from mrl.config.schema import AnyConfig, Config
from mrl.learner import Learner
from mrl.observe import Recorder, SilentRecorder
from mrl.parallel import world_size
from mrl.resilience import sections
from mrl.trainers.shared.best_validation import BestValidation
from mrl.trainers.shared.callbacks import Callbacks
from mrl.trainers.shared.checkpoints import Checkpointer, Stateful, open_run_dir
from mrl.trainers.shared.memory import PhaseMemoryManager
from mrl.trainers.shared.phases import Phases
from mrl.trainers.shared.profile import StepProfiler
from mrl.trainers.shared.run_plan import plan_run
from mrl.trainers.shared.speed import Speed
from mrl.trainers.shared.updates import Updates
from mrl.trainers.shared.world import World


@dataclass
class TrainingLoop:
    """State of every trainer's loop, on every rank.

    start_step: steps done by earlier launches
    callbacks: set by the loop
    """

    cfg: AnyConfig
    world: World
    run_dir: Path
    recorder: Recorder | SilentRecorder
    phase: Phases
    updates: Updates
    checkpointer: Checkpointer
    start_step: int
    callbacks: Callbacks = field(default=Callbacks(), init=False)
    _is_deadline_told: bool = field(default=False, init=False)

    def resume(self) -> None:
        """Resumes from the run directory's newest complete checkpoint, if there is one. Collective."""
        self.start_step = self.checkpointer.resume()

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining steps, from 0; stops early if a validation or a callback ends the run.
        Collective.

        Before each step the run ends if a scheduler has asked for it. After each step, due checkpoints are saved.
        """
        for step in range(self.start_step, self.cfg.run.last_step):
            if self.checkpointer.is_over or self.checkpointer.is_stopped:
                return
            self.exit_if_preempted(step)
            began = time.monotonic()
            with self.phase.profiler.step(step + 1):
                yield step
            self.checkpointer.after_step(step + 1)
            self._compare_with_deadline(step + 1, time.monotonic() - began)

    def _compare_with_deadline(self, step: int, seconds: float) -> None:
        """Warns once if a step takes longer than the scheduler's warning leaves for finishing and saving it."""
        deadline = self.cfg.resilience.save_deadline_s
        if self._is_deadline_told or not self.cfg.effective_checkpoint.every_steps or seconds <= deadline:
            return
        self._is_deadline_told = True
        self.recorder.note(
            f"step {step} took {seconds:.0f} s, longer than resilience.save_deadline_s = {deadline:g}: SIGTERM during "
            "such a step loses all steps since the last checkpoint. Lower checkpoint.every_steps, and set "
            f"resilience.save_deadline_s to {math.ceil(1.5 * seconds)} if the scheduler waits that long before SIGKILL"
        )

    def exit_if_preempted(self, step: int) -> None:
        """Saves and ends this process if a scheduler has asked the run to stop. `step` steps are done. Collective."""

        def leave(deadline_s: float) -> int:
            saved = self.checkpointer.save_now(deadline_s) if step > self.start_step else step
            self.release_resources()
            return saved

        self.phase.exit_if_preempted(step, leave)

    def finish(self) -> None:
        """Ends the run after the last step. Raises NonFiniteError, with everything saved, if that step updated no
        weights of a model."""
        self.checkpointer.finish()
        self.release_resources()
        self.updates.end_of_run()

    def set_callbacks(self, callbacks: Callbacks) -> None:
        """Sets what is called in the course of the run."""
        self.callbacks = callbacks

    def release_resources(self) -> None:
        """Leaves external resources, such as engines, as their next users need them, once everything is saved.
        Collective."""


@dataclass
class Run(TrainingLoop):
    """Run of a language model. Each trainer's subclass adds its other models and its data."""

    actor: Learner
    memory: PhaseMemoryManager
    speed: Speed


@dataclass
class RunSetup:
    """A run during setup: it has the world and, on rank 0, its directory.

    stack: closes, on any exit, what the setup opens
    is_set_up: must be called at the end of the setup, whose timeout runs until then
    """

    cfg: AnyConfig
    world: World
    run_dir: Path
    stack: contextlib.ExitStack
    is_set_up: Callable[[], None]
    recorder: Recorder | SilentRecorder = field(default_factory=SilentRecorder)
    profiler: StepProfiler = field(init=False)

    def begin(
        self,
        actor: Learner,
        parts: Mapping[str, Checkpointable] | None = None,
        states: Mapping[str, Stateful] | None = None,
        kept: Stateful | None = None,
        memory: PhaseMemoryManager | None = None,
        best: BestValidation | None = None,
        end_tokens: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> Run:
        """Returns the run of a language model at step 0. Collective.

        parts: models in a checkpoint, by name; None: the actor alone
        states: JSON state of a trainer's loop, equal on every rank
        kept: state of rank 0 alone
        memory: memory needs by phase; None: nothing is moved
        best: the best validation, part of the run's state
        end_tokens: stop tokens that a model in a checkpoint learns, by its name; rank 0's count
        """
        memory = memory or PhaseMemoryManager()
        cfg, run_dir, recorder = self.cfg, self.run_dir, self.recorder
        assert isinstance(cfg, Config)
        phase, updates = self.watch(actor.mesh.pp_rank, memory)
        checkpointer = Checkpointer(
            cfg, phase, parts or {"actor": actor}, updates, states or {}, kept, best, end_tokens=end_tokens
        )
        self.stack.callback(checkpointer.close)
        speed = Speed(world_size(), plan_run(cfg, run_dir, recorder) if self.world.is_main else None)
        speed.watch(actor)
        return Run(cfg, self.world, run_dir, recorder, phase, updates, checkpointer, 0, actor, memory, speed)

    def watch(self, peers: int, memory: PhaseMemoryManager | None = None) -> tuple[Phases, Updates]:
        """Returns the phases and the update counters of the run. Collective.

        peers: equal on ranks that have the same work
        """
        cfg, run_dir, recorder = self.cfg, self.run_dir, self.recorder
        memory = memory or PhaseMemoryManager()
        phase = Phases.of(cfg.resilience, self.world, run_dir, recorder, peers, self.profiler, memory)
        return phase, Updates(run_dir, cfg.run.max_nonfinite_steps, recorder, writes=self.world.is_main)


@contextlib.contextmanager
def set_up_run(cfg: AnyConfig, longest_wait_s: float | None = None) -> Iterator[RunSetup]:
    """Joins the world on every rank and owns the run directory on rank 0; closes both, and what the setup opened, on
    exit.

    longest_wait_s: maximum seconds that rank 0 may work alone without progress, if longer than `run.timeout_s`; during
    setup resilience.timeouts_s.setup applies, if that is longer
    """
    with contextlib.ExitStack() as stack, failure.noted():
        if cfg.run.deterministic:
            platform.enable_determinism()  # before the GPU is used, and before any engine starts
        longest_wait_s = longest_wait_s or cfg.run.timeout_s
        world = World(cfg.run.timeout_s, max(longest_wait_s, cfg.resilience.timeouts_s.setup), cfg.run.seed)
        stack.callback(world.close)
        run_dir = Path(cfg.run.root) / cfg.run.name
        leave_setup = stack.enter_context(sections.watch_rank(cfg.resilience.timeouts_s, run_dir))

        def is_set_up() -> None:
            world.activity.most_s = longest_wait_s
            leave_setup()

        start = RunSetup(cfg, world, run_dir, stack, is_set_up)

        def own_directory() -> None:
            start.recorder = open_run_dir(cfg, run_dir, stack)

        world.from_main("starting the run", own_directory)
        start.profiler = StepProfiler(cfg.run, run_dir, start.recorder)
        yield start
