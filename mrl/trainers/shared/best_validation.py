"""Best validation of a run and early stopping; part of the run's state."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mrl.config import resume
from mrl.config.schema import Config, HeldOutConfig


class BestValidation:
    """Tracks the best validation and the validations without progress.

    value, step: of the best validation, None before the first. stalled: validations since the last improvement by more
    than `min_delta`. rows: description of the held-out rows, which changes when the rows do.
    """

    def __init__(self, cfg: HeldOutConfig, rows: str = "") -> None:
        self._cfg, self._rows = cfg, rows
        self.value: float | None = None
        self.step: int | None = None
        self.stalled = 0

    @classmethod
    def of(cls, cfg: Config) -> BestValidation | None:
        """Returns None if no held-out rows judge the run."""
        held_out, sources = cfg.held_out(), cfg.data.validation
        if held_out is None or sources is None:
            return None
        contents = [
            (source.model_dump(mode="json"), resume.contents(Path(source.path), source.split)) for source in sources
        ]
        return cls(held_out, json.dumps([contents, held_out.rows]))

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Records the validation after `step` steps; metrics: all metrics of that validation."""
        value = metrics[f"validation/{self._cfg.metric}"]
        better = math.isfinite(value) and (self.value is None or self._gain(value) > 0)
        progress = better and (self.value is None or self._gain(value) > self._cfg.min_delta)
        self.stalled = 0 if progress else self.stalled + 1
        if better:
            self.value, self.step = value, step

    @property
    def is_over(self) -> bool:
        """True if more than `patience` validations in a row brought no progress."""
        return self._cfg.patience is not None and self.stalled >= self._cfg.patience

    @property
    def kept_step(self) -> int | None:
        """Step whose checkpoint is kept besides the newest ones, or None."""
        return self.step if self._cfg.keep_best else None

    def state_dict(self) -> dict[str, Any]:
        seen = {"metric": self._cfg.metric, "rows": self._rows}
        return seen | {"value": self.value, "step": self.step, "stalled": self.stalled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state; ignores a state of another metric or of other rows."""
        if state["metric"] == self._cfg.metric and state.get("rows", self._rows) == self._rows:
            self.value, self.step, self.stalled = state["value"], state["step"], state["stalled"]

    def __str__(self) -> str:
        return f"{self._cfg.metric} {self.value:.4f} at step {self.step}"

    def _gain(self, value: float) -> float:
        assert self.value is not None
        return self.value - value if self._cfg.metric == "loss" else value - self.value
