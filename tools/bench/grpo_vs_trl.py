"""Compares a GRPO step of mrl and of TRL's GRPOTrainer by phase: same model, prompts, lengths and machine.

    python tools/bench/grpo_vs_trl.py --trl-python PYTHON [--shape toy] [--rounds 3] [--steps 14] [--only NAME ...]

The contenders run one after the other, round by round, each in new processes, so that a slow minute of the machine
affects all of them. The first `WARM_STEPS` steps of a run are left out; the results are the minimum, median and mean of
the others over all rounds. Compare the means where response lengths vary (`ends_after`); `tokens` is the mean length.
Phases: rollout (prompts to scored samples), training (samples to updated weights), sync (weights to the engine; TRL
samples from the weights that it trains and needs none), step (all of these).
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
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import workload

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tools.bench import record  # noqa: E402

CORES = 2
WARM_STEPS = 4
RUN_TIMEOUT_S = 1200
MICROBATCH_TOKENS = 8192
MEMORY_EVERY_S = 4.0  # between readings; at 0.5 s, reading the memory of large processes takes a fifth of a core
PHASES = ("rollout", "training", "sync", "step")
HOW = {"minimum": min, "median": statistics.median, "mean": statistics.fmean}
Row = dict[str, float]


@dataclass
class Contender:
    """options: of trl_grpo.py, or overrides of mrl's configuration. env: added to the environment."""

    name: str
    what: str
    options: list[str]
    env: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def is_trl(self) -> bool:
        return self.name.startswith("trl")


CONTENDERS = (
    Contender("trl", "GRPOTrainer, 2 threads, no gradient checkpointing", []),
    Contender(
        "trl_defaults",
        "the same with TRL's defaults: bfloat16 autocast and gradient checkpointing",
        ["--bf16", "--gradient-checkpointing"],
    ),
    Contender("trl_bf16", "the same in bfloat16 autocast", ["--bf16"]),
    Contender(
        "mrl_sglang",
        "data parallelism 2, two SGLang servers",
        ["rollout.engine=sglang", "rollout.servers=2"],
    ),
    Contender(
        "mrl_sglang_one_server",
        "data parallelism 2, one SGLang server",
        ["rollout.engine=sglang"],
    ),
    Contender(
        "mrl_transformers",
        "data parallelism 2, two transformers engines",
        ["rollout.engine=transformers", "rollout.servers=2"],
    ),
    Contender(
        "mrl_bf16",
        "data parallelism 2, two transformers engines, all in bfloat16 with float32 main weights (mrl's default)",
        ["rollout.engine=transformers", "rollout.servers=2", "model.dtype=bfloat16"],
    ),
    Contender(
        "mrl_sglang_bf16",
        "the same with two SGLang servers",
        ["rollout.engine=sglang", "rollout.servers=2", "model.dtype=bfloat16"],
    ),
    Contender(
        "mrl_sglang_mkl",
        "mrl_sglang with MKL's matrix products, which TRL uses too",
        ["rollout.engine=sglang", "rollout.servers=2"],
        {"MRL_PLATFORM_OFF": "onednn_matmul"},
    ),
)


def run_trl(contender: Contender, python: str, directory: Path, shape: str, steps: int) -> dict[str, str]:
    """Runs TRL and adds its rows; returns the versions on TRL's side."""
    command = [python, str(HERE / "trl_grpo.py"), str(directory), shape, str(steps), str(CORES)]
    command += contender.options
    output, peak = run(command, {"OMP_NUM_THREADS": str(CORES), "HF_HUB_OFFLINE": "1", **contender.env})
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    contender.rows += [{"sync": 0.0, **row, "peak_gib": peak} for row in result["rows"][WARM_STEPS:]]
    return dict(result["versions"])


def run_mrl(contender: Contender, directory: Path, shape: workload.Shape, steps: int, number: int) -> None:
    name = f"{contender.name}_{number}"
    config = directory / "mrl.yaml"
    config.write_text(json.dumps(mrl_config(directory, shape, steps)))  # YAML contains JSON
    command = [sys.executable, "-m", "mrl", "train", str(config), f"run.name={name}", *contender.options]
    _, peak = run(command, {"OMP_NUM_THREADS": "1", **contender.env})
    metrics = [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]
    lengths = [round(row["response/mean_tokens"]) for row in metrics]
    if not shape.has_expected_lengths(lengths):
        sys.exit(f"{name}: mean response lengths of {min(lengths)} to {max(lengths)} do not fit the workload")
    for before, row in list(zip(metrics, metrics[1:]))[WARM_STEPS - 1 :]:
        contender.rows.append(
            {
                "rollout": row["time/rollout"],
                "training": row["time/experience"] + row["time/update"],
                "sync": row["time/sync"],
                "step": row["unix_time"] - before["unix_time"],
                "tokens": row["response/mean_tokens"],
                "peak_gib": peak,
            }
        )


def mrl_config(directory: Path, shape: workload.Shape, steps: int) -> dict[str, Any]:
    tokens = min(shape.samples * (shape.prompt_tokens + shape.new_tokens) // CORES, MICROBATCH_TOKENS)
    return {
        "trainer": "rl",
        "run": {"root": str(directory), "name": "run", "steps": steps, "nproc": CORES, "trackers": []},
        "model": {"path": str(directory / "model"), "dtype": "float32"},
        "actor": {"optimizer": {"lr": workload.LEARNING_RATE}, "max_tokens_per_microbatch": tokens},
        "data": {"train": str(directory / "train.jsonl"), "max_prompt_tokens": shape.prompt_tokens},
        "batch": {
            "prompts_per_step": shape.prompts_per_step,
            "samples_per_prompt": workload.SAMPLES_PER_PROMPT,
        },
        "rollout": {"sampling": {"max_new_tokens": shape.new_tokens}},
        "sync": {"verify": "off"},
        "reward": {"function": f"{HERE / 'workload.py'}:share_of_digits"},
        "algorithm": {"adv_estimator": "grpo"},
    }


def run(command: list[str], env: dict[str, str]) -> tuple[str, float]:
    """Returns what the command printed, and the peak memory of all of its processes in GiB."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err, text=True)
        peak = _wait(process)
        out.seek(0), err.seek(0)
        output, errors = out.read(), err.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{output[-3000:]}\n{errors[-3000:]}")
    return output, peak


def _wait(process: subprocess.Popen[str]) -> float:
    """Waits for the end of the process; returns the peak GiB of the process and its descendants together."""
    import psutil

    peak, deadline = 0, time.monotonic() + RUN_TIMEOUT_S
    root = psutil.Process(process.pid)
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
            sys.exit(f"{' '.join(map(str, process.args))} did not end within {RUN_TIMEOUT_S} s")
        used = 0
        for descendant in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has ended
                used += descendant.memory_full_info().pss  # counts shared pages once
        peak = max(peak, used)
        time.sleep(MEMORY_EVERY_S)
    return peak / 2**30


def summary(rows: list[Row]) -> dict[str, dict[str, float]]:
    return {how: {key: round(pick(row[key] for row in rows), 4) for key in rows[0]} for how, pick in HOW.items()}


def result(
    contenders: list[Contender], parameters: int, shape: workload.Shape, versions: dict[str, str], rounds: int,
    steps: int,
) -> dict[str, Any]:  # fmt: skip
    figures = {c.name: {"what": c.what, "steps": len(c.rows), **summary(c.rows)} for c in contenders if c.rows}
    peers = {c.name: "trl_bf16" if c.name.endswith("bf16") else "trl" for c in contenders if not c.is_trl}
    return {
        "versions_of_trl": versions,
        "workload": {"parameters": parameters, **asdict(shape), "samples_per_prompt": workload.SAMPLES_PER_PROMPT},
        "same_work": "the same model, prompts, samples and reward; "
        + (
            "as many tokens"
            if shape.ends_after is None
            else "geometric lengths with the same mean, sampled by each side"
        ),
        "rounds": rounds,
        "steps_a_run": steps,
        "warm_steps_left_out": WARM_STEPS,
        "seconds": figures,
        "times_faster_than_trl": {
            name: {how: faster(figures[peer][how], figures[name][how]) for how in HOW}
            for name, peer in peers.items()
            if peer in figures and name in figures
        },
    }


def faster(trl: dict[str, float], mrl: dict[str, float]) -> dict[str, float]:
    return {phase: round(trl[phase] / mrl[phase], 2) for phase in PHASES if trl[phase] and mrl[phase]}


def main() -> None:
    names = [c.name for c in CONTENDERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with TRL and torch")
    parser.add_argument("--shape", choices=sorted(workload.SHAPES), default="toy")
    parser.add_argument("--rounds", type=int, default=3)
    steps_help = f"steps of a run; the first {WARM_STEPS} are left out (default: 14)"
    parser.add_argument("--steps", type=int, default=14, help=steps_help)
    parser.add_argument("--only", nargs="*", choices=names, default=names, help="contenders to run")
    parser.add_argument("--output", type=Path, help="default: tools/bench/results/grpo_vs_trl_SHAPE.json")
    args = parser.parse_args()
    shape = workload.SHAPES[args.shape]
    contenders = [c for c in CONTENDERS if c.name in args.only]
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        parameters = workload.make(directory, shape)
        for number in range(args.rounds):
            for contender in contenders:
                if contender.is_trl:
                    versions = run_trl(contender, args.trl_python, directory, args.shape, args.steps)
                else:
                    run_mrl(contender, directory, shape, args.steps, number)
                print(f"round {number} {contender.name:22}", json.dumps(summary(contender.rows)["minimum"]), flush=True)
            report = result(contenders, parameters, shape, versions, number + 1, args.steps)
            record.write(args.output or record.RESULTS / f"grpo_vs_trl_{args.shape}.json", report)
    print(json.dumps(report["times_faster_than_trl"], indent=1))


if __name__ == "__main__":
    main()
