"""Drops records of steps after a checkpoint, since a run that resumes repeats those steps."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mrl.observe.files import BY_STEP, json_row

_SAMPLES = re.compile(r"(?:validation_|validation_ema_)?step_(\d+)\.jsonl")


def rewind(run_dir: Path, step: int) -> str:
    """Drops rows and files of RUN_DIR/rollouts of steps after `step`, also of RUN_DIR/adapters/NAME; everything for
    step 0.

    Returns text such as "2 rows of metrics.jsonl, 2 files of rollouts/", empty if nothing was dropped. Each file is cut
    or removed at once, and a writer that appends to it may have it open.
    """
    dropped = [
        f"{found} of {folder.name}" for folder in sorted(run_dir.glob("adapters/*")) if (found := rewind(folder, step))
    ]
    for file in filter(Path.is_file, (run_dir / name for name in sorted(BY_STEP))):
        if rows := _cut(file, step):
            dropped.append(f"{_count(rows, 'row')} of {file.name}")
    # step_K has the training samples of step K, validation_step_K is made after K steps
    steps = {file: _SAMPLES.fullmatch(file.name) for file in (run_dir / "rollouts").glob("*.jsonl")}
    late = [file for file, found in steps.items() if found is not None and (step == 0 or int(found[1]) > step)]
    for file in late:
        file.unlink()
    if late:
        dropped.append(f"{_count(len(late), 'file')} of rollouts/")
    return ", ".join(dropped)


def _cut(file: Path, step: int) -> int:
    """Truncates the file before its first row of a later step or partial line; returns the number of dropped rows.
    Raises UnreadableFile for a damaged row before it."""
    lines = file.read_bytes().splitlines(keepends=True)
    kept = 0
    for number, line in enumerate(lines):
        if not line.endswith(b"\n") or step == 0 or json_row(file, number + 1, line).get("step", 0) > step:
            os.truncate(file, kept)
            return len(lines) - number
        kept += len(line)
    return 0


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number > 1 else "")
