"""Soak test: compares a long run, whose ranks and engine are killed at random, with an undisturbed one.

    python tools/soak.py [--minutes 60] [--kill-every-s 60] [--seed 0] [--folder runs/soak] [--results FILE.json]

A tiny policy, TP2 over gloo, with the transformers engine, under ft_launcher. At random times a rank is killed, a rank
is stopped so that it hangs, or the engine is killed. At the end SIGTERM makes the run save. An undisturbed run of as
many steps follows. Weights, samples and the steps in the metrics must be equal.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mrl.observe import read_metrics  # noqa: E402
from mrl.resilience import EXIT_PREEMPTED  # noqa: E402
from mrl.resilience.protocol import MARKER, read_statuses  # noqa: E402
from tests.helpers.tiny import make_tiny  # noqa: E402
from tests.helpers.train_tools import write_config  # noqa: E402
from tools.bench import record  # noqa: E402

RANKS = 2
MANY_STEPS = 1_000_000
FAULTS = {"rank killed": 6, "rank stopped": 2, "engine killed": 2}  # name -> relative frequency
SETTLE_S = 90.0  # longer than detecting a hang and restarting, so that ranks can save afterwards
LIMITS = {"setup": 60.0, "rollout": 60.0, "reward": 20.0, "update": 20.0, "sync": 20.0, "checkpoint": 20.0}
ENDLESS_RESTARTS = ["run.launcher=ft", "run.max_restarts=100000", "rollout.max_restarts=100000"]


def main() -> int:
    args = arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    config = prepare(args.folder)
    faults = disturb(args, config)
    steps = json.loads((args.folder / "runs/disturbed" / MARKER).read_text())["step"]
    print(f"disturbed: {steps} steps, {dict(faults)}")
    for name in ("disturbed", "undisturbed"):
        assert start(args.folder, config, name, f"run.steps={steps}").wait(3600) == 0
    equal = results_of(args.folder / "runs/disturbed") == results_of(args.folder / "runs/undisturbed")
    restarts = read_restarts(args.folder)
    recovered = sorted(row["recovered_s"] for row in restarts if row["recovered_s"] is not None)
    results = {
        "minutes": args.minutes,
        "steps": steps,
        "faults": dict(faults),
        "restarts_of_all_ranks": len(restarts),
        "recovery_s": {"median": recovered[len(recovered) // 2], "max": recovered[-1]} if recovered else None,
        "equal_to_undisturbed": equal,
    }
    print(json.dumps(results, indent=1))
    if args.results:
        record.write(args.results, results)
    return 0 if equal else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every-s", type=float, default=60.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--results", type=Path, help="JSON file to write")
    args = parser.parse_args()
    args.folder = args.folder.absolute()
    return args


def prepare(folder: Path) -> Path:
    model = folder / "model"
    if not model.exists():
        make_tiny(model, "llama")
    return write_config(
        folder,
        model,
        actor={"parallel": {"tensor": 2}},
        rollout={"engine": "transformers", "sampling": {"max_new_tokens": 8}},
        checkpoint={"every_steps": 5, "export_hf": True},
    )


def start(folder: Path, config: Path, name: str, *overrides: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / f"{name}.terminal").open("ab") as out:
        command = [sys.executable, "-m", "mrl", "train", str(config), f"run.name={name}", *overrides]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)


def disturb(args: argparse.Namespace, config: Path) -> collections.Counter[str]:
    """Runs for args.minutes with random faults; returns the number of faults by name."""
    rng, counts = random.Random(args.seed), collections.Counter[str]()
    limits = f"resilience.timeouts_s={json.dumps(LIMITS)}"
    process = start(args.folder, config, "disturbed", *ENDLESS_RESTARTS, limits, f"run.steps={MANY_STEPS}")
    end = time.monotonic() + 60 * args.minutes
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, rng.uniform(0.5, 1.5) * args.kill_every_s))
        assert process.poll() is None, f"the run ended early: see {args.folder / 'disturbed.terminal'}"
        name = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        if inject(args.folder / "runs/disturbed/logs", name, rng):
            counts[name] += 1
            print(f"{time.strftime('%T')} {name}", flush=True)
    time.sleep(SETTLE_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == EXIT_PREEMPTED
    return counts


def is_engine(process: psutil.Process, logs: Path) -> bool:
    """Returns whether the process is the run's engine, and not its supervisor, by the log that it writes to."""
    with contextlib.suppress(psutil.Error, OSError):
        output = Path(f"/proc/{process.pid}/fd/1").readlink()
        return output == (logs / "engine_0.log").absolute() and "supervisor.py" not in " ".join(process.cmdline())
    return False


def inject(logs: Path, name: str, rng: random.Random) -> bool:
    """Injects a fault; returns whether there was a process to inject it into."""
    statuses = read_statuses(logs)
    try:
        if name == "engine killed":
            next(process for process in psutil.process_iter() if is_engine(process, logs)).kill()
        else:
            victim = rng.choice(statuses).pid
            os.kill(victim, signal.SIGKILL if name == "rank killed" else signal.SIGSTOP)
    except (IndexError, StopIteration, ProcessLookupError, psutil.NoSuchProcess):
        return False
    return True


def results_of(run: Path) -> dict[str, object]:
    samples = {file.name: file.read_bytes() for file in run.glob("rollouts/*.jsonl")}
    weights = (run / "hf/model.safetensors").read_bytes()
    return {**samples, "weights": weights, "steps": [row["step"] for row in read_metrics(run)]}


def read_restarts(folder: Path) -> list[dict[str, float]]:
    file = folder / "runs/disturbed/logs/restarts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


if __name__ == "__main__":
    sys.exit(main())
