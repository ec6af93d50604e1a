"""Measures detection and recovery times of faults in one rank under ft_launcher.

    python tools/bench/recovery.py [--rounds 5] [--rank 1] [--results tools/bench/results/recovery.json]

A tiny policy, TP2 over gloo, saves a checkpoint after every step. In turn, a rank is killed, raises an error or hangs
in an update, each --rounds times: first with an engine that outlives the ranks (rollout.urls), then with one that rank
0 starts. Detection time: from the fault until `mrl train` notices it; for a hang it includes the section's time-out.
Recovery time: from there until every rank has loaded the last checkpoint and the engine has its weights, verified.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mrl.config.schema import RolloutConfig  # noqa: E402
from mrl.inference.start import start_engine  # noqa: E402
from tests.helpers.tiny import make_tiny  # noqa: E402
from tests.helpers.train_tools import given, write_config  # noqa: E402
from tools.bench import record  # noqa: E402

KINDS = ("kill", "exception", "hang")
SECTION = "update"
HANG_LIMIT_S = 5.0
LIMITS = {"setup": 120.0, "rollout": 60.0, "reward": 60.0, "update": HANG_LIMIT_S, "sync": 60.0, "checkpoint": 60.0}
RUN_TIMEOUT_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="faults of each kind")
    parser.add_argument("--rank", type=int, choices=(0, 1), default=1, help="rank with the faults")
    parser.add_argument("--results", type=Path, default=record.RESULTS / "recovery.json")
    args = parser.parse_args()
    results = {"rounds": args.rounds, "rank": args.rank, "hang_limit_s": HANG_LIMIT_S}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny(folder / "model", "llama")
        with start_engine(RolloutConfig(engine="transformers"), str(model), "float32", folder) as engine:
            engine.wait_ready()
            kept = [f"rollout.{key}={value}" for key, value in given(engine, folder).items()]
            results["engine_kept"] = measure(folder, model, args, kept)
        results["engine_of_rank_0"] = measure(folder, model, args, ["rollout.engine=transformers"])
    print(json.dumps(results, indent=1))
    record.write(args.results, results)


def measure(
    folder: Path, model: Path, args: argparse.Namespace, overrides: list[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the minimum, median and maximum of detection_s and recovery_s for each kind of fault."""
    faults = [{"kind": kind, "section": SECTION, "rank": args.rank, "nth": 2} for kind in KINDS] * args.rounds
    file = folder / f"faults_{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps(faults))
    config = write_config(
        folder,
        model,
        run={"name": file.stem, "launcher": "ft", "max_restarts": len(faults), "steps": len(faults)},
        actor={"parallel": {"tensor": 2}},
        rollout={"sampling": {"max_new_tokens": 8}},
        checkpoint={"every_steps": 1},
        resilience={"timeouts_s": {**LIMITS, "out_of_section": 60.0}},
    )
    paths = f"{ROOT / 'tests/worlds/faults'}:{ROOT}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "MRL_TEST_FAULTS": str(file)}
    command = [sys.executable, "-m", "mrl", "train", str(config), *overrides]
    with contextlib.chdir(folder):
        subprocess.run(command, env=environment, check=True, timeout=RUN_TIMEOUT_S)
    fired = [float(line) for line in Path(f"{file}.fired").read_text().splitlines()]
    restarts = folder / "runs" / file.stem / "logs/restarts.jsonl"
    rows = [json.loads(line) for line in restarts.read_text().splitlines()]
    assert len(rows) == len(fired) == len(faults), (len(rows), len(fired), len(faults))
    times = {}
    for kind in KINDS:
        numbers = [n for n, fault in enumerate(faults) if fault["kind"] == kind]
        times[kind] = {
            "detection_s": spread([rows[n]["unix_time"] - fired[n] for n in numbers]),
            "recovery_s": spread([rows[n]["recovered_s"] for n in numbers]),
        }
    return times


def spread(values: list[float]) -> dict[str, float]:
    return {
        "min": round(min(values), 2),
        "median": round(statistics.median(values), 2),
        "max": round(max(values), 2),
    }


if __name__ == "__main__":
    main()
