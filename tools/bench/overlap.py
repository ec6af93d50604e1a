"""Measures gain and cost of asynchronous training: step and idle time, and rewards by staleness.

    python tools/bench/overlap.py time|early [--steps 40] [--rounds 2] [--trainer-core 0] [--engine-core 1]
    python tools/bench/overlap.py curves [--steps 100] [--seeds 1] [--ways 0,1,4]

`time`: one rank and one SGLang engine, each on a core of its own, with several values of `rollout.max_staleness` and
`rollout.interrupt`. A tiny Llama; responses of up to 96 tokens that end at one token of seven. Step and idle times come
from the runs' metrics, without the first three steps. The engine is idle when it has no request, the trainer while it
waits for samples. The settings alternate within each round. `early`: the same with PPO, a critic and a reference, with
and without `rollout.early_passes`.

`curves`: the guess task (yaml_configs/quickstart_agent.yaml) with one rank, asynchronous with each max_staleness, with
and without the off-policy correction. mrl refuses off-policy samples without a correction, so the uncorrected runs use
an estimator that cancels it (uncorrected.py). Results and picture are written after every run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mrl.config.schema import RolloutConfig  # noqa: E402
from mrl.inference.engine import Engine  # noqa: E402
from mrl.inference.start import start_engine  # noqa: E402
from tests.helpers.tiny import make_tiny  # noqa: E402
from tests.helpers.train_tools import given, write_config  # noqa: E402
from tools.bench import record  # noqa: E402

CORRECTION = "algorithm.rollout_correction={rollout_is: token}"
WAYS = {
    "none": (),
    "one_step": ("rollout.max_staleness=1", CORRECTION),
    "bounded 1": ("rollout.interrupt=at_sync", "rollout.max_staleness=1", CORRECTION),
    "bounded 2": ("rollout.interrupt=at_sync", "rollout.max_staleness=2", CORRECTION),
}
EARLY_WAYS = {"after all samples": (), "3 parts": ("rollout.early_passes=3",)}
MODEL_SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
PPO = {
    "algorithm": {"adv_estimator": "gae", "kl": {"use_in_reward": True, "coef": 0.05}},
    "critic": {"optimizer": {"lr": 1e-4}},
    "batch": {"prompts_per_step": 24, "samples_per_prompt": 8},
}
MAX_RUNNING_REQUESTS = 48  # fewer than a step's samples, as in a run with thousands of samples
WARM_UP = 3  # steps not counted
RUN_TIMEOUT_S = 3600
UNCORRECTED = (
    "algorithm.adv_estimator=function",
    "algorithm.advantage={function: 'tools/bench/uncorrected.py:uncorrected'}",
)
AVERAGED_STEPS = 10  # a point of the picture is the mean over these steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "early", "curves"))
    parser.add_argument("--steps", type=int, help="steps of a run (default: 40, for curves 100)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1, help="seeds of curves")
    parser.add_argument("--ways", default="0,1,4", help="values of max_staleness of curves")
    parser.add_argument("--trainer-core", type=int, default=0)
    parser.add_argument("--engine-core", type=int, default=1)
    args = parser.parse_args()
    cores = args.trainer_core, args.engine_core
    with tempfile.TemporaryDirectory() as name:
        if args.what == "time":
            measure_times(Path(name), args.steps or 40, args.rounds, cores, WAYS, {}, None, "overlap_time.json")
        elif args.what == "early":
            setup = EARLY_WAYS, PPO, MAX_RUNNING_REQUESTS, "early_passes.json"
            measure_times(Path(name), args.steps or 40, args.rounds, cores, *setup, **MODEL_SIZES)
        else:
            staleness = [int(value) for value in args.ways.split(",")]
            measure_curves(Path(name), args.steps or 100, args.seeds, staleness)


@contextlib.contextmanager
def engine_on(cores: set[int], model: Path, folder: Path, running: int | None = None) -> Iterator[Engine]:
    """Starts SGLang on these cores. running: maximum number of requests in its batch"""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        engine = start_engine(RolloutConfig(max_running_requests=running), str(model), "float32", folder)
    finally:
        os.sched_setaffinity(0, before)
    with engine:
        engine.wait_ready()
        yield engine


def train(cores: set[int], *args: str) -> None:
    """Runs `mrl train` on these cores."""
    subprocess.run(
        [sys.executable, "-m", "mrl", "train", *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=RUN_TIMEOUT_S,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )


def rows_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
    return [row for row in rows if row["step"]]


# ---- time


def measure_times(
    folder: Path,
    steps: int,
    rounds: int,
    cores: tuple[int, int],
    ways: Mapping[str, tuple[str, ...]],
    sections: Mapping[str, Any],
    running: int | None,
    file: str,
    **sizes: int,
) -> None:
    """Measures runs with each setting.

    Args:
        ways: overrides by the setting's name
        sections: sections that replace those of the common configuration
        sizes: of the model, where it is not tiny
    """
    model = make_tiny(folder / "model", "llama", **sizes)
    results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with engine_on({cores[1]}, model, folder, running) as engine:
        sampling = {"max_new_tokens": 96, "stop_token_ids": list(range(3, 320, 7))}
        common: dict[str, Any] = {
            "actor": {"optimizer": {"lr": 1e-4}},
            "batch": {
                "prompts_per_step": 12,
                "samples_per_prompt": 8,
                "samples_per_minibatch": 24,
                "epochs_per_step": 2,
            },
            "run": {"root": str(folder / "runs")},
        }
        common |= {**sections, "rollout": {"sampling": sampling, **given(engine, folder)}}
        config = write_config(folder, model, **common)
        for number in range(rounds):
            for way, overrides in ways.items():
                run = f"{way.replace(' ', '_')}_{number}"
                train({cores[0]}, str(config), f"run.name={run}", f"run.steps={steps}", *overrides)
                results[way].append(step_times(folder / "runs" / run))
                print(way, results[way][-1], flush=True)
    figures = {"steps": steps, "rounds": rounds, "ways": {way: medians(rows) for way, rows in results.items()}}
    record.write(record.RESULTS / file, figures | {"each": results})


def step_times(run_dir: Path) -> dict[str, float]:
    """Returns means over steps: seconds, the idle shares of these of engine and trainer, and tokens' age in steps."""
    rows, loads = rows_of(run_dir, "metrics.jsonl"), rows_of(run_dir, "engines.jsonl")
    wall = rows[-1]["unix_time"] - rows[WARM_UP - 1]["unix_time"]
    used = sum(each["seconds"] for row in loads[WARM_UP:] for each in row["engines"].values())
    waits = sum(row["time/rollout"] for row in rows[WARM_UP:])  # the main thread waits for samples
    return {
        "seconds": wall / (len(rows) - WARM_UP),
        "engine_idle": 1 - used / wall,
        "trainer_idle": waits / wall,
        "age": statistics.fmean(row.get("staleness/mean", 0.0) for row in rows[WARM_UP:]),
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


# ---- curves


def measure_curves(folder: Path, steps: int, seeds: int, staleness: list[int]) -> None:
    task, all_cores = folder / "task", os.sched_getaffinity(0)
    subprocess.run([sys.executable, "tools/make_guess_task.py", task], cwd=ROOT, check=True)
    curves: dict[str, list[dict[str, Any]]] = {}
    with engine_on(all_cores, task / "model_init", folder) as engine:
        config = curves_config(folder, task, given(engine, folder), steps)
        ways = [(age, corrected) for age in staleness for corrected in (True, False) if age or corrected]
        for seed, (age, corrected) in itertools.product(range(1, seeds + 1), ways):
            name = f"{age}{'' if corrected else ' uncorrected'}"
            run = f"age_{name.replace(' ', '_')}_{seed}"
            overrides = [f"run.name={run}", f"run.seed={seed}", f"rollout.max_staleness={age}"]
            train(all_cores, str(config), *overrides, *(() if corrected else UNCORRECTED))
            curves.setdefault(name, []).append(curve(folder / "runs" / run))
            print(name, seed, curves[name][-1]["last"], flush=True)
            figures = {"steps": steps, "uncorrected": UNCORRECTED, "ways": curves}
            record.write(record.RESULTS / "overlap_rewards.json", figures)
            plot(ROOT / "docs" / "overlap_rewards.png", curves)


def curves_config(folder: Path, task: Path, engine: dict[str, Any], steps: int) -> Path:
    """Writes the guess task's configuration for one rank, without limits on the mismatch of trainer and engine."""
    limits = dict.fromkeys(("warn", "stop", "warn_sample", "stop_sample"))
    changes = {
        "base": str(ROOT / "yaml_configs" / "quickstart_agent.yaml"),
        "run": {"root": str(folder / "runs"), "steps": steps, "trackers": []},
        "model": {"path": str(task / "model_init")},
        "data": {"train": str(task / "train.jsonl"), "validation": str(task / "validation.jsonl")},
        "actor": {"parallel": {"tensor": 1, "pipeline": 1}},
        "rollout": {"interrupt": "at_sync", "mismatch": limits, **engine},
        "algorithm": {"rollout_correction": {"rollout_is": "token"}},
        "validation": {"every_steps": steps},
    }
    file = folder / "curves.yaml"
    file.write_text(yaml.safe_dump(changes))
    return file


def curve(run_dir: Path) -> dict[str, Any]:
    """Returns a run's share of won games.

    Returns:
        reward_mean, mean, last: by step with sampled answers, the mean over all steps, over the last AVERAGED_STEPS
        greedy: with greedy answers, by step of the validation
        staleness: of tokens in steps, mean over steps
        weight_max, effective_sample_size, cut: of the importance weights, means over steps
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"]]
    rewards = [row["reward/mean"] for row in steps]
    means = {
        "weight_max": "rollout_corr/rollout_is_max",
        "effective_sample_size": "rollout_corr/rollout_is_eff_sample_size",
        "cut": "rollout_corr/rollout_is_ratio_fraction_high",
    }
    return {
        "last": round(statistics.fmean(rewards[-AVERAGED_STEPS:]), 4),
        "mean": round(statistics.fmean(rewards), 4),
        "greedy": {row["step"]: round(row["validation/mean"], 4) for row in rows if "validation/mean" in row},
        "staleness": round(statistics.fmean(row.get("staleness/mean", 0.0) for row in steps), 4),
        **{name: round(statistics.fmean(row[key] for row in steps), 4) for name, key in means.items()},
        "reward_mean": [round(reward, 4) for reward in rewards],
    }


def plot(file: Path, curves: dict[str, list[dict[str, Any]]]) -> None:
    """Plots the running mean of each setting over the seeds that all settings have, and each seed in a pale color.

    Lines of uncorrected runs are dashed.
    """
    from mrl.observe.curves import INK, PALETTE, empty_axes

    figure, axes = empty_axes((7, 4))
    shared = min(len(seeds) for seeds in curves.values())
    colours = dict(zip(dict.fromkeys(name.split()[0] for name in curves), PALETTE, strict=False))
    for name, seeds in curves.items():
        age, *uncorrected = name.split()
        style: dict[str, Any] = {"color": colours[age], "linestyle": "--" if uncorrected else "-"}
        smooth = [running_mean(each["reward_mean"]) for each in seeds[:shared]]
        steps = range(1, len(smooth[0]) + 1)
        for line in smooth if len(smooth) > 1 else ():
            axes.plot(steps, line, alpha=0.25, linewidth=0.8, **style)
        label = f"max_staleness {age}{', uncorrected' if uncorrected else ''}"
        axes.plot(
            steps, [statistics.fmean(at) for at in zip(*smooth, strict=True)], linewidth=1.8, label=label, **style
        )
    axes.set_ylabel(f"games won, sampled (mean of {AVERAGED_STEPS} steps)", color=INK, fontsize=8.5)
    axes.set_ylim(0, 1.02)
    axes.set_title(f"guess a number, {shared} seed{'s' * (shared > 1)}", color=INK, fontsize=9.5)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    figure.savefig(file, dpi=110, bbox_inches="tight")
    print(f"wrote {file}")


def running_mean(values: list[float]) -> list[float]:
    """Returns the means of each value and up to AVERAGED_STEPS - 1 values before it."""
    return [statistics.fmean(values[max(0, at - AVERAGED_STEPS + 1) : at + 1]) for at in range(len(values))]


if __name__ == "__main__":
    main()
