"""How mrl and TRL are run beside each other on the same work, timed and compared.

The contenders run one after the other, round by round, each in fresh processes, so that a slow minute of the machine
hits all of them: TRL in one process of so many threads as there are cores, mrl in so many processes. On a busy machine
take one core: threads that wait for each other burn processor time. The first `WARM_STEPS` steps of a run are left out;
of the rest the whole counts, since steps differ in their lengths. Of the rounds the fastest and the median are told, by
the clock and by processor time, which other programs on the machine disturb less.
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
LOSS_DIFFERENCE = 2e-3  # of any step
TICKS = os.sysconf("SC_CLK_TCK")
MEASURES = ("seconds", "processor")
SIDES = ("trl", "mrl")

Measured = dict[str, float]  # of each of MEASURES seconds


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What every comparison is told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with TRL and torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--cores", type=int, default=2)
    return parser


def run_trl(python: str, program: str, words: Iterable[object], cores: int) -> tuple[Measured, list[float], Any]:
    """Seconds of all steps but the warm ones, the losses of all, and versions; by a program of this folder."""
    command = [python, str(HERE / program), *map(str, words)]
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
    found = json.loads(line.removeprefix("RESULT "))
    rows = found["rows"][WARM_STEPS:]
    return {measure: sum(row[measure] for row in rows) for measure in MEASURES}, found["losses"], found["versions"]


def run_mrl(
    directory: Path, config: Mapping[str, Any], loss: str, work: Callable[[range], float]
) -> tuple[Measured, list[float]]:
    """Seconds a piece of work of all steps but the warm ones, and the losses of all.

    config: whose run is to be in `directory`; loss: its metric; work: pieces in these steps
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
    """Of each side, pieces of work a second and a core's second, from seconds a piece."""
    return {
        side: {
            f"{how}_{measure}": round(1 / pick(row[measure] for row in found), digits)
            for how, pick in (("fastest", min), ("median", statistics.median))
            for measure in MEASURES
        }
        for side, found in rounds.items()
    }


def ratios(speeds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How many times mrl has TRL's."""
    return {key: round(speeds["mrl"][key] / speeds["trl"][key], 2) for key in speeds["mrl"]}


def layout(cores: int) -> dict[str, str]:
    return {"trl": f"1 process, {cores} threads", "mrl": f"data parallelism {cores}"}


def _processor_by_rows(process: subprocess.Popen[bytes], metrics: Path) -> dict[int, float]:
    """Number of rows in metrics.jsonl -> processor seconds of all processes of the run when that many were first
    seen, as long as none of them has ended."""
    found: dict[int, float] = {}
    end = time.monotonic() + RUN_TIMEOUT_S
    while process.poll() is None and time.monotonic() < end:
        rows = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if rows not in found:
            found[rows] = _processor(process.pid)
        time.sleep(0.02)
    most = list(itertools.accumulate(found.values(), max))
    return {rows: used for (rows, used), so_far in zip(found.items(), most) if rows and used == so_far}


def _processor(pid: int) -> float:
    """Seconds of a process and all below it that live; one that has ended counts nothing."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            int(p) for task in Path(f"/proc/{pid}/task").iterdir() for p in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS + sum(map(_processor, children))
