"""metrics.jsonl: one line a step, flushed at once, readable while the run goes on."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from mrl.core import StepStats
from mrl.observe.files import METRICS, Unreadable, append, drop_torn_line, read_jsonl

Row = dict[str, float]


class MetricsFile:
    """Appends `{"step", "unix_time", metric: value, ..., "time/<phase>": seconds}` a line.

    Not-a-number and infinities become null (JSON has neither); `write` returns their names. A row is
    written whole or not at all (OSError).
    """

    def __init__(self, file: Path) -> None:
        drop_torn_line(file)
        self._file = file
        append(file, "")

    def write(self, stats: StepStats) -> list[str]:
        """Names of the metrics that are not finite. Raises OSError, and then nothing is written."""
        values = flatten(stats)
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        row: dict[str, Any] = {"step": stats.step, "unix_time": round(time.time(), 3)}
        row |= {name: None if name in bad else value for name, value in values.items()}
        append(self._file, json.dumps(row, allow_nan=False) + "\n")
        return bad


def flatten(stats: StepStats) -> Row:
    """metric -> value, and "time/<phase>" -> seconds."""
    times = {f"time/{phase}": seconds for phase, seconds in stats.seconds.items()}
    return {name: float(value) for name, value in {**stats.metrics, **times}.items()}


def read_metrics(run_dir: Path) -> list[Row]:
    """The run's rows by rising step. Nulls are left out of a row.

    A run that went on from a checkpoint repeats the steps after it; what the abandoned attempt wrote is left out.
    Raises Unreadable.
    """
    rows: list[Row] = []
    file = run_dir / METRICS
    for raw in read_jsonl(file):
        if raw.get("step") is None or not all(map(_is_number, raw.values())):
            raise Unreadable(f"{file}: a row is no step with numbers: {json.dumps(raw)[:200]}")
        while rows and rows[-1]["step"] >= raw["step"]:
            rows.pop()
        rows.append({name: value for name, value in raw.items() if value is not None})
    return rows


def _is_number(value: Any) -> bool:
    """Or the null that stands for one that was not finite."""
    return value is None or (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
