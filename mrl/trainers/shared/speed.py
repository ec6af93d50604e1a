"""How much a step computes, how fast, and how fast by the plan: what `perf/...` and `plan/...` are in the metrics."""

from __future__ import annotations

from mrl.core import Rollout, StepStats
from mrl.learner import Learner
from mrl.trainers.shared.planned import Planned

COMPUTING = ("experience", "update")  # phases in which the ranks' models run


class Speed:
    """Of the learners that it watches.

    world_size: ranks that share the work; on GPUs a rank is a GPU
    planned: rank 0's, where there is a plan to compare with
    """

    def __init__(self, world_size: int, planned: Planned | None = None) -> None:
        self._world_size, self._planned = world_size, planned
        self._learners: list[Learner] = []
        self._before = 0

    def watch(self, *learners: object) -> None:
        """Those that are models of their own; copies compute in their learner's place."""
        self._learners += [learner for learner in learners if isinstance(learner, Learner)]

    def metrics(self, stats: StepStats, learnt: Rollout, tokens: int, seconds: float) -> dict[str, float]:
        """Of one step, whose phases and updates are in `stats`.

        learnt: the samples that it has learnt from; tokens: that it is counted in; seconds: all of it

        perf/tokens_per_s, perf/tokens_per_s_per_rank: over the whole step
        perf/model_tflop: 10^12 operations of the models' forward and backward passes, attention with its causal half;
        what is computed again (recompute), what the engines compute and what a reward model computes for them are not
        counted
        perf/tflop_per_s_per_rank: that over the seconds of the phases that the models run in
        perf/mfu: that over what the GPU can do at most; plan/...: see `Planned.metrics`; both where there is a plan
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
        """What has been computed since the last step, such as a validation, is no part of the next one."""
        self._since()

    def _since(self) -> int:
        """Operations since the last call."""
        total = sum(learner.work.total for learner in self._learners)
        flops, self._before = total - self._before, total
        return flops
