"""metrics.jsonl: one line a step, flushed at once, readable while the run goes on; and tensorboard beside it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from mrl.core import StepStats
from mrl.observe.files import drop_torn_line, read_jsonl

Row = dict[str, float]


class MetricsFile:
    """Appends `{"step", "unix_time", metric: value, ..., "time/<phase>": seconds}` a line.

    Not-a-number and infinities become null (JSON has neither); `write` returns their names.
    """

    def __init__(self, file: Path) -> None:
        drop_torn_line(file)
        self._handle = file.open("a")

    def write(self, stats: StepStats) -> list[str]:
        values = flatten(stats)
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        row: dict[str, Any] = {"step": stats.step, "unix_time": round(time.time(), 3)}
        row |= {name: None if name in bad else value for name, value in values.items()}
        self._handle.write(json.dumps(row, allow_nan=False) + "\n")
        self._handle.flush()
        return bad

    def close(self) -> None:
        self._handle.close()


def flatten(stats: StepStats) -> Row:
    times = {f"time/{phase}": seconds for phase, seconds in stats.seconds.items()}
    return {name: float(value) for name, value in {**stats.metrics, **times}.items()}


def read_metrics(run_dir: Path) -> list[Row]:
    """The run's rows by rising step. Nulls are left out of a row.

    A run that went on from a checkpoint repeats the steps after it; what the abandoned attempt wrote is left out.
    """
    rows: list[Row] = []
    for raw in read_jsonl(run_dir / "metrics.jsonl"):
        while rows and rows[-1]["step"] >= raw["step"]:
            rows.pop()
        rows.append({name: value for name, value in raw.items() if value is not None})
    return rows


class TensorboardWriter:
    """Scalars in RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "tensorboard"
        self._writer: Any = None

    def write(self, stats: StepStats) -> None:
        self._writer = self._writer or self._open(stats.step)
        for name, value in flatten(stats).items():
            self._writer.add_scalar(name, value, stats.step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, first_step: int) -> Any:
        """Of an earlier attempt at these steps nothing is shown."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=first_step)
