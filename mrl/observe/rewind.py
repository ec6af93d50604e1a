"""A run that goes on from a checkpoint makes the steps after it again: what was written down of them goes first."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from mrl.observe.files import BY_STEP

_SAMPLES = re.compile(r"(?:validation_|validation_ema_)?step_(\d+)\.jsonl")


def rewind(run_dir: Path, step: int) -> str:
    """Drops all rows of the run's own files with a line a step, and files of RUN_DIR/rollouts, that are of more than
    `step` steps; of 0 steps, everything. Says what, such as "2 rows of metrics.jsonl, 2 files of rollouts/"; empty if
    there was nothing.

    Each file is cut or removed at once, and a writer that appends to it may have it open.
    """
    dropped = []
    for file in filter(Path.is_file, (run_dir / name for name in sorted(BY_STEP))):
        if rows := _cut(file, step):
            dropped.append(f"{_count(rows, 'row')} of {file.name}")
    late = [file for file in (run_dir / "rollouts").glob("*.jsonl") if _is_late(file.name, step)]
    for file in late:
        file.unlink()
    if late:
        dropped.append(f"{_count(len(late), 'file')} of rollouts/")
    return ", ".join(dropped)


def _cut(file: Path, step: int) -> int:
    """Ends the file before its first row of a later step, or half a line; returns the number of rows that are gone."""
    lines = file.read_bytes().splitlines(keepends=True)
    kept = 0
    for number, line in enumerate(lines):
        if not line.endswith(b"\n") or step == 0 or json.loads(line).get("step", 0) > step:
            os.truncate(file, kept)
            return len(lines) - number
        kept += len(line)
    return 0


def _is_late(name: str, step: int) -> bool:
    """step_K holds the samples that step K learns from; validation_step_K is made after K steps."""
    match = _SAMPLES.fullmatch(name)
    return match is not None and (step == 0 or int(match[1]) > step)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number > 1 else "")
