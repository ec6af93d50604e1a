"""Phases of a step: each moves memory, is timed and shown, has a timeout, and is compared over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mrl.config.schema import ResilienceConfig
from mrl.core import StepStats
from mrl.observe import STRAGGLERS, Recorder, SilentRecorder, append_jsonl
from mrl.resilience import preemption, sections
from mrl.resilience.stragglers import StragglerDetector
from mrl.trainers.shared.memory import PhaseMemoryManager
from mrl.trainers.shared.profile import StepProfiler
from mrl.trainers.shared.world import World

SECTION_OF = {
    "rollout": "rollout",
    "validation": "rollout",
    "experience": "update",
    "update": "update",
    "sync": "sync",
    "checkpoint": "checkpoint",
    "save_weights": "checkpoint",
}


@dataclass
class Phases:
    """The phases of one run. Use `phases(name, stats)` as a context around a part of a step."""

    world: World
    run_dir: Path
    recorder: Recorder | SilentRecorder
    stragglers: StragglerDetector
    save_deadline_s: float
    profiler: StepProfiler
    memory: PhaseMemoryManager = field(default_factory=PhaseMemoryManager)

    @classmethod
    def of(
        cls,
        cfg: ResilienceConfig,
        world: World,
        run_dir: Path,
        recorder: Recorder | SilentRecorder,
        peers: int,
        profiler: StepProfiler,
        memory: PhaseMemoryManager,
    ) -> Phases:
        """Builds the phases of a run. peers: equal on ranks that have the same work"""
        stragglers = StragglerDetector(world.gather, peers, cfg.straggler_every_steps, cfg.straggler_ratio)
        return cls(world, run_dir, recorder, stragglers, cfg.save_deadline_s, profiler, memory)

    @contextmanager
    def __call__(self, name: str, stats: StepStats) -> Iterator[None]:
        section = SECTION_OF[name]
        with (
            self.stragglers.timed(section),
            sections.section(section),
            self.recorder.phase(name, stats),
            self.profiler.phase(name),
        ):
            self.memory.begin(name)
            yield

    def end_of_step(self, stats: StepStats) -> None:
        """Adds memory metrics and, when a comparison is due, the slowest rank. Collective if due."""
        stats.metrics |= self.memory.metrics()
        report = self.stragglers.end_of_step()
        if report is None:
            return
        stats.metrics |= report.metrics()
        if self.world.is_main:
            row = {"step": stats.step, "steps": report.steps, **report.seconds}
            file = self.run_dir / STRAGGLERS
            self.recorder.write_guarded("the ranks' times", lambda: append_jsonl(file, row))
        note = report.note()
        if note is not None:
            self.recorder.note(f"step {stats.step}: {note}")

    def exit_if_preempted(self, step: int, leave: Callable[[float], int]) -> None:
        """Saves and ends this process if a scheduler's signal has reached any rank. Called before a step. Collective.

        step: steps done. leave: takes the seconds that saving may need and returns the newest step on disk, 0 if there
        is none
        """
        if not self.world.any(preemption.is_requested()):
            return
        saved = leave(preemption.seconds_left(self.save_deadline_s))
        kept = f"step {saved} is saved" if saved else "no step is saved"
        self.recorder.note(f"stopping after step {step} on a signal: {kept}")
        preemption.leave(self.run_dir, saved)
