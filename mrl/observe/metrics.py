"""metrics.jsonl: one line a step, flushed at once, readable while the run goes on."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from mrl.core import StepStats
from mrl.observe.files import METRICS, UnreadableFile, append, drop_torn_line, read_jsonl

Row = dict[str, float]


class MetricsFile:
    """Appends lines of `{"step", "unix_time", metric: value, ..., "time/<phase>": seconds}`.

    NaN and infinities become null, since JSON has neither; `write` returns their names. A row is written whole or not
    at all (OSError).
    """

    def __init__(self, file: Path) -> None:
        drop_torn_line(file)
        self._file = file
        append(file, "")

    def write(self, stats: StepStats) -> list[str]:
        """Appends a row and returns the names of its non-finite metrics. Raises OSError, and then nothing is
        written."""
        values = flatten(stats)
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        row: dict[str, Any] = {"step": stats.step, "unix_time": round(time.time(), 3)}
        row |= {name: None if name in bad else value for name, value in values.items()}
        append(self._file, json.dumps(row, allow_nan=False) + "\n")
        return bad


def flatten(stats: StepStats) -> Row:
    """Returns metric -> value, and "time/<phase>" -> seconds."""
    times = {f"time/{phase}": seconds for phase, seconds in stats.seconds.items()}
    return {name: float(value) for name, value in {**stats.metrics, **times}.items()}


def read_metrics(run_dir: Path) -> list[Row]:
    """Returns the run's rows in order of steps, without nulls.

    A run resumed from a checkpoint repeats later steps; rows of the abandoned attempt are left out. Raises
    UnreadableFile.
    """
    rows: list[Row] = []
    file = run_dir / METRICS
    for raw in read_jsonl(file):
        if raw.get("step") is None or not all(map(_is_number, raw.values())):
            raise UnreadableFile(f"{file}: a row is not a step with numeric metrics: {json.dumps(raw)[:200]}")
        while rows and rows[-1]["step"] >= raw["step"]:
            rows.pop()
        rows.append({name: value for name, value in raw.items() if value is not None})
    return rows


def _is_number(value: Any) -> bool:
    """True for a finite number, or for null, which stands for a non-finite one."""
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
