"""Reward curves of the quickstart in emulated fp8 and other precisions, for several seeds.

    python -m tools.bench.fp8_curves [--algorithms ppo,grpo] [--forms float32,current,blockwise] [--seeds 3]
                                     [--steps 80] [--dry-run]

Run `python tools/quickstart.py` first: it writes the task to runs/quickstart and the initial model to
runs/quickstart_sft/hf. Each run has one process, the transformers engine, the quickstart's batches and fewer steps, and
the directory runs/fp8_ALGORITHM_FORM_SEED; complete runs are not repeated. For each algorithm it writes JSON to
tools/bench/results and a picture to docs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench import record

RECIPES = ("current", "delayed", "blockwise", "mxfp8")
FORMS = ("float32", "bfloat16", *RECIPES)
WITH_CRITIC = ("ppo",)
RUN_TIMEOUT_S = 3600
METRIC = "reward/mean"
ONE_PROCESS = "parallel={tensor: 1, pipeline: 1, context: 1}"


def overrides(algorithm: str, form: str, seed: int, steps: int) -> list[str]:
    """Returns the overrides of one run."""
    keys = [f"run.name=fp8_{algorithm}_{form}_{seed}", f"run.seed={seed}", "run.existing=move_aside"]
    keys += [f"run.steps={steps}", f"actor.optimizer.decay_steps={steps - 5}", "run.nproc=1"]
    models = ("actor", *(("critic",) if algorithm in WITH_CRITIC else ()))
    keys += ["rollout.engine=transformers", *(f"{model}.{ONE_PROCESS}" for model in models)]
    if form == "bfloat16":
        keys.append("model.dtype=bfloat16")
    for model in models if form in RECIPES else ():
        head = ", head: true" if model == "actor" else ""
        keys.append(f"{model}.precision.fp8={{recipe: {form}, emulate: true{head}}}")
    return keys


def rewards(run_dir: Path) -> list[float]:
    """Returns the mean reward of each step that the run has finished."""
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row[METRIC] for row in rows if METRIC in row]


def train(algorithm: str, form: str, seed: int, steps: int) -> list[float]:
    """Returns the mean reward of every step, from a finished run if there is one."""
    run_dir = record.ROOT / "runs" / f"fp8_{algorithm}_{form}_{seed}"
    if len(rewards(run_dir)) < steps:
        command = [sys.executable, "-m", "mrl", "train", f"yaml_configs/quickstart_{algorithm}.yaml"]
        command += overrides(algorithm, form, seed, steps)
        subprocess.run(command, cwd=record.ROOT, check=True, timeout=RUN_TIMEOUT_S)
    return rewards(run_dir)[:steps]


def figures(steps: int, curves: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Returns the curves by precision and seed, and the means of their first and last ten steps."""
    ends = {
        form: [{"first": statistics.fmean(seed[:10]), "last": statistics.fmean(seed[-10:])} for seed in seeds]
        for form, seeds in curves.items()
    }
    rounded = {form: [[round(value, 4) for value in seed] for seed in seeds] for form, seeds in curves.items()}
    return {"metric": METRIC, "steps": steps, "mean_of_10_steps": ends, "curves": rounded}


def plot(file: Path, algorithm: str, curves: dict[str, list[list[float]]]) -> None:
    """Plots the mean over seeds as a line, and their range as a band, for each key of `curves`."""
    from matplotlib.figure import Figure

    from mrl.observe.curves import PALETTE

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for colour, (form, seeds) in zip(PALETTE, curves.items(), strict=False):
        steps = list(zip(*seeds, strict=True))
        numbers = range(1, len(steps) + 1)
        axes.plot(numbers, [statistics.fmean(step) for step in steps], color=colour, label=form)
        axes.fill_between(numbers, [*map(min, steps)], [*map(max, steps)], color=colour, alpha=0.15)
    count = len(next(iter(curves.values())))
    title = f"quickstart by {algorithm.upper()}: mean and range of {count} seeds"
    axes.set(xlabel="step", ylabel=METRIC, title=title)
    axes.legend()
    figure.savefig(file, dpi=110)
    print(f"wrote {file}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default="ppo,grpo")
    parser.add_argument(
        "--forms", default="float32,bfloat16,current,blockwise", help=f"precisions, of {','.join(FORMS)}"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    args = parser.parse_args(argv)
    algorithms, forms = args.algorithms.split(","), args.forms.split(",")
    if args.dry_run:
        for algorithm, form, seed in ((a, f, s) for a in algorithms for f in forms for s in range(args.seeds)):
            keys = overrides(algorithm, form, seed, args.steps)
            print("mrl train", f"yaml_configs/quickstart_{algorithm}.yaml", *map(repr, keys))
        return
    for algorithm in algorithms:
        curves = {f: [train(algorithm, f, seed, args.steps) for seed in range(args.seeds)] for f in forms}
        plot(record.ROOT / "docs" / f"fp8_{algorithm}.png", algorithm, curves)
        record.write(record.RESULTS / f"fp8_{algorithm}.json", figures(args.steps, curves))


if __name__ == "__main__":
    main()
