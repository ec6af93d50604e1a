"""Whether the quickstart learns as well in emulated fp8: its curves of rewards, a line a form, several seeds each.

    python -m tools.bench.fp8_curves [--algorithms ppo,grpo] [--forms float32,current,blockwise] [--seeds 3]
                                     [--steps 80] [--dry-run]

Each run is one process beside transformers' generate, of fewer steps than the quickstart's, with its batches. Wants
what `python tools/quickstart.py` has left: the task in runs/quickstart and the start in runs/quickstart_sft/hf.
Runs are runs/fp8_ALGORITHM_FORM_SEED; those that are there with all their steps are not made again. Writes figures
to tools/bench/results, and of each algorithm a picture to docs.
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

FORMS = {
    "float32": (),
    "bfloat16": ("model.dtype=bfloat16",),
    **{name: (f"recipe: {name}",) for name in ("current", "delayed", "blockwise", "mxfp8")},
}
WITH_CRITIC = ("ppo",)
RUN_TIMEOUT_S = 3600
METRIC = "reward/mean"
ONE_PROCESS = "parallel={tensor: 1, pipeline: 1, context: 1}"


def overrides(algorithm: str, form: str, seed: int, steps: int) -> list[str]:
    """Of one run."""
    words = [f"run.name=fp8_{algorithm}_{form}_{seed}", f"run.seed={seed}", "run.existing=move_aside"]
    words += [f"run.steps={steps}", f"actor.optimizer.decay_steps={steps - 5}", "run.nproc=1"]
    models = ("actor", *(("critic",) if algorithm in WITH_CRITIC else ()))
    words += ["rollout.engine=transformers", *(f"{model}.{ONE_PROCESS}" for model in models)]
    for word in FORMS[form]:
        is_recipe = word.startswith("recipe")
        for model in models if is_recipe else ():
            head = ", head: true" if model == "actor" else ""
            words.append(f"{model}.precision.fp8={{{word}, emulate: true{head}}}")
        words += [] if is_recipe else [word]
    return words


def rewards(run_dir: Path) -> list[float]:
    """A step after the other; as many as there are."""
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row[METRIC] for row in rows if METRIC in row]


def train(algorithm: str, form: str, seed: int, steps: int) -> list[float]:
    """Made only where it is not there yet."""
    run_dir, config = record.ROOT / "runs" / f"fp8_{algorithm}_{form}_{seed}", f"quickstart_{algorithm}.yaml"
    words = [f"yaml_configs/{config}", *overrides(algorithm, form, seed, steps)]
    if len(rewards(run_dir)) < steps:
        subprocess.run(
            [sys.executable, "-m", "mrl", "train", *words], cwd=record.ROOT, check=True, timeout=RUN_TIMEOUT_S
        )
    return rewards(run_dir)[:steps]


def figures(steps: int, curves: dict[str, list[list[float]]]) -> dict[str, Any]:
    """form -> a curve a seed, and of each the mean of its first and of its last ten steps."""
    ends = {
        form: [{"first": statistics.fmean(seed[:10]), "last": statistics.fmean(seed[-10:])} for seed in seeds]
        for form, seeds in curves.items()
    }
    rounded = {form: [[round(value, 4) for value in seed] for seed in seeds] for form, seeds in curves.items()}
    return {"metric": METRIC, "steps": steps, "mean_of_10_steps": ends, "curves": rounded}


def draw(file: Path, algorithm: str, curves: dict[str, list[list[float]]]) -> None:
    """form -> a curve a seed: their mean as a line, their range as a band."""
    from matplotlib.figure import Figure

    from mrl.observe.curves import PALETTE

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for colour, (form, seeds) in zip(PALETTE, curves.items(), strict=False):
        steps = list(zip(*seeds, strict=True))
        numbers = range(1, len(steps) + 1)
        axes.plot(numbers, [statistics.fmean(step) for step in steps], color=colour, label=form)
        axes.fill_between(numbers, [*map(min, steps)], [*map(max, steps)], color=colour, alpha=0.15)
    seeds_of = len(next(iter(curves.values())))
    axes.set(
        xlabel="step", ylabel=METRIC, title=f"quickstart by {algorithm.upper()}: mean and range of {seeds_of} seeds"
    )
    axes.legend()
    figure.savefig(file, dpi=110)
    print(f"written to {file}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default="ppo,grpo")
    parser.add_argument("--forms", default="float32,bfloat16,current,blockwise", help=f"of {','.join(FORMS)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--dry-run", action="store_true", help="only show what would be run")
    args = parser.parse_args(argv)
    algorithms, forms = args.algorithms.split(","), args.forms.split(",")
    if args.dry_run:
        for algorithm, form, seed in ((a, f, s) for a in algorithms for f in forms for s in range(args.seeds)):
            words = overrides(algorithm, form, seed, args.steps)
            print("mrl train", f"yaml_configs/quickstart_{algorithm}.yaml", *map(repr, words))
        return
    for algorithm in algorithms:
        curves = {f: [train(algorithm, f, seed, args.steps) for seed in range(args.seeds)] for f in forms}
        draw(record.ROOT / "docs" / f"fp8_{algorithm}.png", algorithm, curves)
        record.write(record.RESULTS / f"fp8_{algorithm}.json", figures(args.steps, curves))


if __name__ == "__main__":
    main()
