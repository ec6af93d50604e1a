"""Measures time and memory that grow with ranks, samples and tokens: mrl's code with simulated engines and models.

    python tools/bench/scaling.py [--as before|after] [--only PART ...] [--small]

Each size of each part runs in its own process. Its row goes to results/scaling.json under the label of `--as`, so that
two commits can be compared. docs/benchmarks/scaling.md explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench import record  # noqa: E402

FILE = record.RESULTS / "scaling.json"
LIMIT_S = 540
SIZES: dict[str, list[dict[str, Any]]] = {
    "sampling": [
        {"samples": 512, "tokens": 2_000},
        {"samples": 1_024, "tokens": 12_000},
        {"samples": 8_192, "tokens": 12_000},
    ],
    "client": [
        {"samples": 8_192, "tokens": 256, "in_flight": 256},
        {"samples": 8_192, "tokens": 256, "in_flight": 2_000},
        {"samples": 32_768, "tokens": 256, "in_flight": 2_000},
    ],
    "host": [
        {"samples": 512, "tokens": 2_000, "ranks": 64, "minibatch": 512},
        {"samples": 2_048, "tokens": 12_000, "ranks": 64, "minibatch": 512},
        {"samples": 8_192, "tokens": 12_000, "ranks": 1_024, "minibatch": 512},
        {"samples": 512, "tokens": 2_000, "ranks": 64, "minibatch": 512, "critic": True},
        {"samples": 8_192, "tokens": 12_000, "ranks": 1_024, "minibatch": 512, "critic": True},
    ],
    "plan": [
        {"samples": 512, "tokens": 2_000, "ranks": 64},
        {"samples": 8_192, "tokens": 12_000, "ranks": 64},
        {"samples": 8_192, "tokens": 12_000, "ranks": 1_024},
    ],
    "engines": [{"servers": 8}, {"servers": 128}, {"servers": 1_024}],
    "broadcast": [{"receivers": count, "mib": 256} for count in (1, 2, 4, 8)],
    "world": [
        {"ranks": 2, "tokens": 1_000_000},
        {"ranks": 4, "tokens": 12_000_000},
        {"ranks": 2, "tokens": 98_000_000},
    ],
    "start": [{"ranks": 8}, {"ranks": 16}, {"ranks": 32}, {"ranks": 64}],
    "checkpoint": [{"ranks": 64}, {"ranks": 1_024}],
    "layout": [{"ranks": 64}, {"ranks": 1_024}],
}  # fmt: skip


def run_part(part: str, size: dict[str, Any]) -> dict[str, float]:
    """Measures in this process; returns the row."""
    from tools.bench import scaling_parts, scaling_worlds

    row = (scaling_parts.PARTS | scaling_worlds.PARTS)[part](**size)
    return {name: round(value, 4) for name, value in row.items()}


def measure(part: str, size: dict[str, Any]) -> dict[str, Any]:
    """Measures in a new process; returns the row, with a `problem` if it failed."""
    command = [sys.executable, __file__, "--only", part, "--size", json.dumps(size)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {**size, "problem": f"more than {LIMIT_S} s"}
    if done.returncode != 0:
        return {**size, "problem": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return {**size, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="label", choices=("before", "after"), default="after", help="label of the rows")
    parser.add_argument("--only", nargs="*", choices=SIZES, default=list(SIZES), help="parts to measure")
    parser.add_argument("--small", action="store_true", help="measure only the first size of each part, write nothing")
    parser.add_argument("--size", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.size is not None:
        print(json.dumps(run_part(args.only[0], args.size)), flush=True)
        return
    last = json.loads(FILE.read_text()) if FILE.is_file() else {}
    results = {name: last.get(name, {}) for name in ("before_commit", "before", "after")}
    for part in args.only:
        rows = []
        for size in SIZES[part][: 1 if args.small else None]:
            rows.append(measure(part, size))
            print(part, json.dumps(rows[-1]), flush=True)
        results[args.label][part] = rows
    if not args.small:
        record.write(FILE, results)


if __name__ == "__main__":
    main()
