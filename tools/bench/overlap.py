"""What sampling beside learning gains and costs: wall time and idle shares by `rollout.overlap`, and curves of rewards
by the age of samples, with and without correction.

    python tools/bench/overlap.py time [--steps 40] [--rounds 2] [--trainer-core 0] [--engine-core 1]
    python tools/bench/overlap.py curves [--steps 100] [--seeds 1] [--ways 0,1,4]

`time`: one rank and one SGLang, each on a core of its own, so that they are as two machines; a tiny Llama, responses of
up to 96 tokens that end at one token of seven. Seconds a step and idle shares are of the runs' own time lines, without
the first three steps: the engine is idle when it has no request, the trainer while it waits for samples. Rounds
alternate.

`curves`: the guess task (yaml_configs/quickstart_agent.yaml) in one rank, `bounded` with each max_staleness, once with
token weights and once without any correction, which mrl itself refuses. Draws a picture into docs.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mrl import ports  # noqa: E402
from mrl.config.schema import RolloutConfig  # noqa: E402
from mrl.rollout import Engine, start_engine  # noqa: E402
from tests.tiny import make_tiny  # noqa: E402
from tests.train_tools import given, write_config  # noqa: E402
from tools.bench import record  # noqa: E402

CORRECTION = "algorithm.rollout_correction={rollout_is: token}"
WAYS = {
    "none": (),
    "one_step": ("rollout.overlap=one_step", CORRECTION),
    "bounded 1": ("rollout.overlap=bounded", "rollout.max_staleness=1", CORRECTION),
    "bounded 2": ("rollout.overlap=bounded", "rollout.max_staleness=2", CORRECTION),
}
WARM_UP = 3  # steps that are left out
RUN_TIMEOUT_S = 3600
# `mrl train` of one rank in this process, whose checks let samples of older weights be learnt from uncorrected
UNCORRECTED = """
import sys
from mrl.config.checks import overlap
overlap._learning = lambda cfg, key: iter(())
from mrl.cli import main
sys.exit(main())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "curves"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--ways", default="0,1,4", help="of curves: values of max_staleness")
    parser.add_argument("--trainer-core", type=int, default=0)
    parser.add_argument("--engine-core", type=int, default=1)
    args = parser.parse_args()
    cores = args.trainer_core, args.engine_core
    with tempfile.TemporaryDirectory() as name:
        if args.what == "time":
            measure_time(Path(name), args.steps or 40, args.rounds, cores)
        else:
            ages = [int(age) for age in args.ways.split(",")]
            measure_curves(Path(name), args.steps or 100, args.seeds, ages, cores)


@contextlib.contextmanager
def engine_on(core: int, model: Path, folder: Path) -> Iterator[Engine]:
    """SGLang on one core; this process may run anywhere again afterwards."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        engine = start_engine(RolloutConfig(), str(model), "float32", folder)
    finally:
        os.sched_setaffinity(0, before)
    with engine:
        engine.wait_ready()
        yield engine


def train(core: int, *words: str, corrected: bool = True) -> None:
    """On one core; one rank, in one process where nothing corrects."""
    command = [sys.executable, "-m", "mrl"] if corrected else [sys.executable, "-c", UNCORRECTED]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not corrected:
        rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        environment |= {name: str(value) for name, value in rank.items()} | {"MASTER_PORT": str(ports.free_port())}
    subprocess.run(
        [*command, "train", *words],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=RUN_TIMEOUT_S,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


def rows_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
    return [row for row in rows if row["step"]]


# ---- time


def measure_time(folder: Path, steps: int, rounds: int, cores: tuple[int, int]) -> None:
    model = make_tiny(folder / "model", "llama")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with engine_on(cores[1], model, folder) as engine:
        sampling = {"max_new_tokens": 96, "stop_token_ids": list(range(3, 320, 7))}
        config = write_config(
            folder,
            model,
            actor={"optimizer": {"lr": 1e-4}},
            batch={"prompts_per_step": 12, "samples_per_prompt": 8, "samples_per_minibatch": 24, "epochs_per_step": 2},
            rollout={"sampling": sampling, **given(engine, folder)},
            run={"root": str(folder / "runs")},
        )
        for number in range(rounds):
            for way, words in WAYS.items():
                run = f"{way.replace(' ', '_')}_{number}"
                train(cores[0], str(config), f"run.name={run}", f"run.steps={steps}", *words)
                found[way].append(shares(folder / "runs" / run))
                print(way, found[way][-1], flush=True)
    figures = {"steps": steps, "rounds": rounds, "ways": {way: medians(each) for way, each in found.items()}}
    record.write(record.RESULTS / "overlap_time.json", figures | {"each": found})


def shares(run_dir: Path) -> dict[str, float]:
    """seconds: of a step; engine_idle, trainer_idle: of these; age: of tokens, in steps; all means."""
    rows, loads = rows_of(run_dir, "metrics.jsonl"), rows_of(run_dir, "engines.jsonl")
    wall = rows[-1]["unix_time"] - rows[WARM_UP - 1]["unix_time"]
    used = sum(each["seconds"] for row in loads[WARM_UP:] for each in row["engines"].values())
    waits = sum(row["time/rollout"] for row in rows[WARM_UP:])  # for samples, in the main thread
    return {
        "seconds": wall / (len(rows) - WARM_UP),
        "engine_idle": 1 - used / wall,
        "trainer_idle": waits / wall,
        "age": statistics.fmean(row.get("staleness/mean", 0.0) for row in rows[WARM_UP:]),
    }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


# ---- curves


def measure_curves(folder: Path, steps: int, seeds: int, ages: list[int], cores: tuple[int, int]) -> None:
    subprocess.run([sys.executable, "tools/make_guess_task.py", folder / "task"], cwd=ROOT, check=True)
    task, curves = folder / "task", dict[str, list[list[float]]]()
    with engine_on(cores[1], task / "model_init", folder) as engine:
        files = [f"model.path={task / 'model_init'}", f"data.train={task / 'train.jsonl'}", "data.validation=null"]
        own = [f"rollout.{key}={json.dumps(value)}" for key, value in given(engine, folder).items()]
        shape = ["actor.parallel={tensor: 1, pipeline: 1}", f"run.root={folder / 'runs'}", f"run.steps={steps}"]
        # where nothing corrects, the trainer and the engine may be as far apart as they get
        apart = "rollout.mismatch={warn: null, stop: null, warn_sample: null, stop_sample: null}"
        for age in ages:
            for corrected in (True, False) if age else (True,):
                name = f"{age}{'' if corrected else ' uncorrected'}"
                curves[name] = []
                for seed in range(1, seeds + 1):
                    run = f"age_{name.replace(' ', '_')}_{seed}"
                    words = [*files, *own, *shape, apart, f"run.name={run}", f"run.seed={seed}"]
                    words += ["rollout.overlap=bounded", f"rollout.max_staleness={age}"]
                    words += [CORRECTION] if corrected else ["run.launcher=torchrun"]
                    train(cores[0], "yaml_configs/quickstart_agent.yaml", *words, corrected=corrected)
                    curves[name].append([row["reward/mean"] for row in rows_of(folder / "runs" / run, "metrics.jsonl")])
                    print(name, seed, [round(x, 3) for x in curves[name][-1][9::10]], flush=True)
    last = {name: [round(statistics.fmean(seed[-10:]), 4) for seed in each] for name, each in curves.items()}
    rounded = {name: [[round(x, 4) for x in seed] for seed in each] for name, each in curves.items()}
    figures = {"steps": steps, "mean_of_last_10_steps": last, "reward_mean": rounded}
    record.write(record.RESULTS / "overlap_rewards.json", figures)
    draw(ROOT / "docs" / "overlap_rewards.png", curves)


def draw(file: Path, curves: dict[str, list[list[float]]]) -> None:
    """name -> a curve a seed: their mean, over ten steps; dashed where nothing corrects."""
    from matplotlib.figure import Figure

    from mrl.observe.curves import PALETTE

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(dict.fromkeys(name.split()[0] for name in curves), PALETTE, strict=False))
    for name, seeds in curves.items():
        age, *uncorrected = name.split()
        means = [statistics.fmean(step) for step in zip(*seeds, strict=True)]
        smooth = [statistics.fmean(means[max(0, at - 9) : at + 1]) for at in range(len(means))]
        label = f"max_staleness {age}{', uncorrected' if uncorrected else ''}"
        axes.plot(
            range(1, len(smooth) + 1), smooth, color=colours[age], linestyle="--" if uncorrected else "-", label=label
        )
    many = len(next(iter(curves.values())))
    axes.set(xlabel="step", ylabel="games won (mean of 10 steps)", title=f"guess a number: {many} seed(s)", ylim=(0, 1))
    axes.legend()
    figure.savefig(file, dpi=110)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
