"""Scores of a reward model on the trainer's own ranks: all samples at once, after the last one is submitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mrl.reward.errors import RewardError, SampleError
from mrl.reward.plan import Component
from mrl.reward.score_requests import Outcome, ScoreRequest, set_outcome

if TYPE_CHECKING:
    from mrl.core import Sample

ScoreSamples = Callable[["Sequence[Sample]"], Sequence[float]]


class RewardModelSource:
    """Collects samples; `flush` runs the model on them, in the thread that calls it."""

    def __init__(self) -> None:
        self.score: ScoreSamples | None = None
        self._waiting: list[tuple[ScoreRequest, str, Future[Outcome]]] = []

    def submit(self, component: Component, call: ScoreRequest, label: str) -> Future[Outcome]:
        """Returns a future that `flush` settles: the model scores all samples at once."""
        future: Future[Outcome] = Future()
        self._waiting.append((call, label, future))
        return future

    def flush(self, component: Component, futures: Collection[Future[Outcome]]) -> None:
        """Scores all collected samples. Raises the model's errors."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        if self.score is None:
            raise RewardError("the reward model is not loaded yet")
        scores = self.score([call.sample for call, _, _ in waiting if call.sample is not None])
        for (_, label, future), score in zip(waiting, scores, strict=True):
            if math.isfinite(score):
                set_outcome(future, Outcome(score))
            else:
                set_outcome(future, SampleError(f"reward model on {label}: the score must be finite, got {score}"))
