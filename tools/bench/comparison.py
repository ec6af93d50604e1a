"""Runs mrl and TRL on the same workload and compares their speed, for SFT and preference learning.

Both run one after the other, round by round, each in new processes, so that a slow minute of the machine affects both.
TRL has one process with as many threads as cores, mrl one process per core. On a busy machine use one core: threads
that wait for each other use processor time. The first `WARM_STEPS` steps of a run are left out; the others count as a
whole, since steps differ in length. The results are the fastest and the median round, in wall time and in processor
time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WARM_STEPS = 4
RUN_TIMEOUT_S = 400
LOSS_DIFFERENCE = 2e-3  # bound of the difference of a step's losses
TICKS = os.sysconf("SC_CLK_TCK")
MEASURES = ("seconds", "processor")
SIDES = ("trl", "mrl")

Measured = dict[str, float]  # seconds for each of MEASURES


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the arguments of every comparison."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with TRL and torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--cores", type=int, default=2)
    return parser


def run_trl(python: str, program: str, args: Iterable[object], cores: int) -> tuple[Measured, list[float], Any]:
    """Runs a program of this folder; returns the seconds of all steps after warm-up, all losses, and versions."""
    command = [python, str(HERE / program), *map(str, args)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": str(cores), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    rows = result["rows"][WARM_STEPS:]
    return {measure: sum(row[measure] for row in rows) for measure in MEASURES}, result["losses"], result["versions"]


def run_mrl(
    directory: Path, config: Mapping[str, Any], loss: str, work: Callable[[range], float]
) -> tuple[Measured, list[float]]:
    """Runs `mrl train`; returns the seconds per unit of work of all steps after warm-up, and all losses.

    Args:
        config: its run.root must be `directory`
        loss: name of the loss's metric
        work: returns the units of work in a range of steps
    """
    name = config["run"]["name"]
    file, metrics = directory / f"{name}.yaml", directory / name / "metrics.jsonl"
    file.write_text(json.dumps(config))  # YAML contains JSON
    with (directory / f"{name}.txt").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "mrl", "train", str(file)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        used = _processor_by_rows(process, metrics)
        if process.wait(RUN_TIMEOUT_S):
            output.seek(0)
            sys.exit(f"mrl train {file} ended with {process.returncode}:\n{output.read()[-3000:]}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    begun, ended = min(n for n in used if n >= WARM_STEPS), max(used)
    seconds = rows[-1]["unix_time"] - rows[WARM_STEPS - 1]["unix_time"]
    measured = {
        "seconds": seconds / work(range(WARM_STEPS, len(rows))),
        "processor": (used[ended] - used[begun]) / work(range(begun, ended)),
    }
    return measured, [row[loss] for row in rows]


def per_second(rounds: Mapping[str, Sequence[Measured]], digits: int | None = None) -> dict[str, dict[str, float]]:
    """Returns the units of work per second of wall and of processor time for each side, from seconds per unit."""
    return {
        side: {
            f"{how}_{measure}": round(1 / pick(row[measure] for row in rows), digits)
            for how, pick in (("fastest", min), ("median", statistics.median))
            for measure in MEASURES
        }
        for side, rows in rounds.items()
    }


def ratios(speeds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns mrl's speeds relative to TRL's."""
    return {key: round(speeds["mrl"][key] / speeds["trl"][key], 2) for key in speeds["mrl"]}


def layout(cores: int) -> dict[str, str]:
    return {"trl": f"1 process, {cores} threads", "mrl": f"data parallelism {cores}"}


def _processor_by_rows(process: subprocess.Popen[bytes], metrics: Path) -> dict[int, float]:
    """Returns the processor seconds of all processes of the run when metrics.jsonl first had each number of rows.

    Times after a process has ended are left out, since its seconds are then missing.
    """
    used_at: dict[int, float] = {}
    end = time.monotonic() + RUN_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if rows not in used_at:
            used_at[rows] = _processor(process.pid)
        time.sleep(0.02)
    most = list(itertools.accumulate(used_at.values(), max))
    return {rows: used for (rows, used), so_far in zip(used_at.items(), most) if rows and used == so_far}


def _processor(pid: int) -> float:
    """Returns the processor seconds of a process and its descendants; one that has ended counts 0."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS + sum(map(_processor, children))
