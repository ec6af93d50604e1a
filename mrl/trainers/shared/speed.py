"""How much a step computes, and how fast: what `perf/...` says in the metrics."""

from __future__ import annotations

from mrl.core import StepStats
from mrl.learner import Learner

COMPUTING = ("experience", "update")  # phases in which the ranks' models run


class Speed:
    """Of the learners that it watches.

    world_size: ranks that share the work; on GPUs a rank is a GPU
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._learners: list[Learner] = []
        self._before = 0

    def watch(self, *learners: object) -> None:
        """Those that are models of their own; copies compute in their learner's place."""
        self._learners += [learner for learner in learners if isinstance(learner, Learner)]

    def metrics(self, stats: StepStats, tokens: int, seconds: float) -> dict[str, float]:
        """Of one step, whose phases are in `stats`.

        tokens: that the step is counted in; seconds: all of it

        perf/tokens_per_s, perf/tokens_per_s_per_rank: over the whole step
        perf/model_tflop: 10^12 operations of the models' forward and backward passes, attention with its causal half;
        what is computed again (recompute), what the engines compute and what a reward model computes for them are not
        counted
        perf/tflop_per_s_per_rank: that over the seconds of the phases that the models run in
        """
        total = sum(learner.flops for learner in self._learners)
        flops, self._before = total - self._before, total
        busy = sum(stats.seconds.get(phase, 0.0) for phase in COMPUTING)
        return {
            "perf/tokens_per_s": tokens / seconds,
            "perf/tokens_per_s_per_rank": tokens / seconds / self._world_size,
            "perf/model_tflop": flops / 1e12,
            "perf/tflop_per_s_per_rank": flops / 1e12 / max(busy, 1e-9) / self._world_size,
        }
