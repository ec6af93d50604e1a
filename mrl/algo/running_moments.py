"""Running mean and standard deviation of a stream of values."""

from __future__ import annotations

import math

from torch import Tensor


class RunningMoments:
    """Moments of batches merged one after the other (Chan, Golub, LeVeque 1979), in float64.

    std has ddof 1, as in TRL; it is 1 before the second value (TRL: NaN after one).
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # sum of squared distances from the mean

    @property
    def std(self) -> float:
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 1.0

    def update(self, values: Tensor) -> None:
        """Merges `values` (any shape, floating point), ignoring those that are not finite."""
        batch = values[values.isfinite()].double()
        if not batch.numel():
            return
        mean, total = float(batch.mean()), self.count + batch.numel()
        away = mean - self.mean
        self._squares += float((batch - mean).square().sum()) + away * away * self.count * batch.numel() / total
        self.mean += away * batch.numel() / total
        self.count = total

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self._squares = int(state["count"]), state["mean"], state["squares"]
