"""Throughput of a step, measured (`perf/...`) and planned (`plan/...`)."""

from __future__ import annotations

from mrl.core import Rollout, StepStats
from mrl.learner import Learner
from mrl.trainers.shared.run_plan import RunPlan

COMPUTING = ("experience", "update")  # phases in which the ranks' models run


class Speed:
    """Throughput of the watched learners.

    world_size: ranks that share the work; on GPUs a rank is a GPU
    planned: on rank 0, where there is a plan to compare with
    """

    def __init__(self, world_size: int, planned: RunPlan | None = None) -> None:
        self._world_size, self._planned = world_size, planned
        self._learners: list[Learner] = []
        self._before = 0

    def watch(self, *learners: object) -> None:
        """Adds the learners among these; copies compute in their learner's place."""
        self._learners += [learner for learner in learners if isinstance(learner, Learner)]

    def metrics(self, stats: StepStats, learnt: Rollout, tokens: int, seconds: float) -> dict[str, float]:
        """Returns throughput metrics of one step, whose phases and updates are in `stats`.

        learnt: the step's training samples; tokens: their count for the rate; seconds: of the whole step

        perf/tokens_per_s, perf/tokens_per_s_per_rank: over the whole step
        perf/model_tflop: 10^12 operations of the models' forward and backward passes, with the causal half of
        attention; recomputation, the engines and their reward models are not counted
        perf/tflop_per_s_per_rank: over the seconds of the phases in which the models run
        perf/mfu: share of the GPU's peak; plan/...: see `RunPlan.metrics`; both only with a plan
        """
        flops = self._since()
        busy = sum(stats.seconds.get(phase, 0.0) for phase in COMPUTING)
        speed = flops / max(busy, 1e-9) / self._world_size
        found = {
            "perf/tokens_per_s": tokens / seconds,
            "perf/tokens_per_s_per_rank": tokens / seconds / self._world_size,
            "perf/model_tflop": flops / 1e12,
            "perf/tflop_per_s_per_rank": speed / 1e12,
        }
        if self._planned is not None:
            found |= {"perf/mfu": speed / self._planned.peak_flops, **self._planned.metrics(stats, learnt)}
        return found

    def leave_out(self) -> None:
        """Excludes work since the last step, such as a validation, from the next one."""
        self._since()

    def _since(self) -> int:
        """Operations since the last call."""
        total = sum(learner.flop_counter.total for learner in self._learners)
        flops, self._before = total - self._before, total
        return flops
