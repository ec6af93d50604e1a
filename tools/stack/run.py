"""Tests mrl with the newer Megatron-Core, and checkpoints that move between both versions: `make test-stack`.

Usage: .venv-312/bin/python -m tools.stack.run [--other .venv/bin/python] [CHECK ...]

Runs the named checks, by default all, one after the other in at most ten minutes. Writes the results to
tools/stack/results/stack.json; results of checks that did not run are kept. Commit this file: python -m
tools.stack.support generates a table of docs/support.md from it. The exit code is 0 if all checks passed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mrl.observe import read_metrics
from mrl.packages import versions
from tools.bench import record

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "stack.json"
LIMIT_S = 600.0  # of all checks
PACKAGES = ("megatron-core", "torch", "transformers")
SHORT, LONG = 4, 8  # steps: a checkpoint of the first SHORT is resumed up to LONG
CLOSE = 1e-4  # relative difference of the losses of two stacks
TESTS = {
    "models at several layouts": ["tests/distributed/models/test_models.py"],
    "families against transformers": ["tests/distributed/models/test_families.py"],
    "gated delta nets": [
        "tests/distributed/models/test_gated_delta_nets.py",
        "tests/unit/kernels/test_gated_delta.py",
        "tests/unit/families/test_families_refused.py",
    ],
    "gradients at several layouts": ["tests/distributed/learner/test_gradients.py"],
    "checkpoints": ["tests/distributed/checkpoint/test_checkpoint.py"],
    "convert": ["tests/system/commands/test_convert.py"],
    "weight sync with the transformers engine": ["tests/system/inference/test_sync_transformers.py"],
}
VERSIONS = f"""
import json, platform
from mrl.packages import versions
print(json.dumps({{"python": platform.python_version(), **versions(*{PACKAGES})}}))
"""


class Failed(Exception):
    """Raised by a check that failed, with the reason."""


@dataclass(frozen=True)
class Stacks:
    """Python interpreters of both environments. work: directory of the runs. end: of all checks, by time.monotonic()"""

    here: str
    other: str
    work: Path
    end: float

    def run(self, python: str, *arguments: str | Path) -> str:
        """Returns what `python *arguments` printed. Raises Failed if it fails or the time is over."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command, left = [python, *map(str, arguments)], max(1.0, self.end - time.monotonic())
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            raise Failed(f"all checks together took longer than {LIMIT_S:g} s") from None
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise Failed(f"exit code {done.returncode}: " + "\n".join(lines[-30:]))
        return done.stdout

    def train(self, python: str, name: str, config: str, *keys: str) -> list[float]:
        """Runs a quickstart in `work`, or continues the run of that name; returns the losses by step."""
        task = self.work / "task"
        data = [f"data.{part}={task}/data/{part}.jsonl" for part in ("train", "validation")]
        overrides = [f"run.root={self.work}", f"run.name={name}", *data, *keys]
        self.run(python, "-m", "mrl", "train", f"yaml_configs/{config}.yaml", *overrides)
        return losses(self.work / name)


def losses(run: Path) -> list[float]:
    """Returns the losses of a run by step, without the validation before step 1."""
    return [row["actor/loss"] for row in read_metrics(run) if row["step"]]


def tests(stacks: Stacks, *arguments: str) -> dict[str, Any]:
    out = stacks.run(stacks.here, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    return {"tests": out.strip().splitlines()[-1].strip("= ")}


def start(stacks: Stacks) -> list[float]:
    """Trains the model that other checks start from, in work/sft/hf, if it does not exist; returns the losses."""
    model, run = f"model.path={stacks.work}/task/model_init", stacks.work / "sft"
    return losses(run) if run.exists() else stacks.train(stacks.here, "sft", "quickstart_sft", model, "run.steps=20")


def sft(stacks: Stacks) -> dict[str, Any]:
    """SFT of the quickstart at TP2 x PP2 gives the same losses with both stacks."""
    here = start(stacks)
    model = f"model.path={stacks.work}/task/model_init"
    other = stacks.train(stacks.other, "sft_other", "quickstart_sft", model, f"run.steps={LONG}")
    return {"steps": len(here), "last loss": here[-1], **compared(here[:LONG], other)}


def grpo(stacks: Stacks) -> dict[str, Any]:
    """GRPO of the quickstart at CP2 x DP2, from the SFT weights, with the transformers engine."""
    start(stacks)
    keys = (f"model.path={stacks.work}/sft/hf", "rollout.engine=transformers", "reward.function=sorted_digits")
    keys += ("batch.prompts_per_step=16", "validation.prompts=8", "run.steps=3")
    return {"steps": len(stacks.train(stacks.here, "grpo", "quickstart_grpo", *keys))}


def delta_nets(stacks: Stacks) -> dict[str, Any]:
    """SFT and GRPO of a tiny Qwen3-Next, with the transformers engine."""
    sizes = "yaml_configs/models/sort-qwen3-next/config.json"
    stacks.run(stacks.here, "tools/make_sort_task.py", stacks.work / "delta_task", "--sizes", sizes)
    start, layout = stacks.work / "delta_task" / "model_init", "actor.parallel={tensor: 1, pipeline: 1, expert: 2}"
    few = ("run.nproc=2", "run.steps=10")
    stacks.train(stacks.here, "delta_sft", "quickstart_sft", f"model.path={start}", layout, *few)
    keys = (f"model.path={stacks.work}/delta_sft/hf", "rollout.engine=transformers", "reward.function=sorted_digits")
    keys += ("batch.prompts_per_step=16", "validation.prompts=8", "run.steps=2")
    return {"steps": len(stacks.train(stacks.here, "delta_grpo", "quickstart_grpo", *keys))}


def resume(stacks: Stacks) -> dict[str, Any]:
    """Checkpoints of one stack are resumed by the other, both ways, with the losses of an uninterrupted run."""
    keys = (f"model.path={stacks.work}/task/model_init", f"checkpoint.every_steps={SHORT}")
    whole = stacks.train(stacks.here, "whole", "quickstart_sft", *keys, f"run.steps={LONG}")
    numbers: dict[str, Any] = {}
    for name, first, second in (("from other", stacks.other, stacks.here), ("to other", stacks.here, stacks.other)):
        run = name.replace(" ", "_")
        stacks.train(first, run, "quickstart_sft", *keys, f"run.steps={SHORT}")
        resumed = stacks.train(second, run, "quickstart_sft", *keys, f"run.steps={LONG}")
        numbers |= {f"{name}: {key}": value for key, value in compared(resumed, whole).items()}
    return numbers


def convert(stacks: Stacks) -> dict[str, Any]:
    """Conversion to Megatron's format by one stack and back by the other gives the same tensors."""
    start(stacks)
    source = stacks.work / "sft" / "hf"
    for name, first, second in (("from", stacks.other, stacks.here), ("to", stacks.here, stacks.other)):
        middle, back = stacks.work / f"megatron_{name}", stacks.work / f"hf_{name}"
        stacks.run(first, "-m", "mrl", "convert", "hf-to-megatron", source, middle)
        stacks.run(second, "-m", "mrl", "convert", "megatron-to-hf", middle, back)
        want, got = tensors(source), tensors(back)
        if want.keys() != got.keys() or not all(torch.equal(got[key], want[key]) for key in want):
            raise Failed(f"the tensors of {back} differ from those of {source}")
    return {"conversions": 4}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a Hugging Face directory. Raises Failed if there are none."""
    loaded = {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}
    if not loaded:
        raise Failed(f"{directory} has no tensors")
    return loaded


def compared(got: list[float], want: list[float]) -> dict[str, float]:
    """Returns the largest relative difference. Raises Failed unless both have LONG losses that are close."""
    if len(got) != len(want) or len(got) != LONG:
        raise Failed(f"{len(got)} and {len(want)} steps instead of {LONG}")
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
    if worst > CLOSE:
        raise Failed(f"the losses {got} and {want} differ by {worst:.2g}, more than {CLOSE}")
    return {"largest difference of losses": worst}


CHECKS: dict[str, Callable[[Stacks], dict[str, Any]]] = {
    "SFT of the quickstart, the losses of both stacks": sft,
    "GRPO of the quickstart": grpo,
    "SFT and GRPO of a tiny Qwen3-Next": delta_nets,
    "checkpoints of one stack continued by the other": resume,
    "conversion by one stack and back by the other": convert,
    **{name: lambda stacks, arguments=arguments: tests(stacks, *arguments) for name, arguments in TESTS.items()},
}


def run_check(name: str, stacks: Stacks) -> dict[str, Any]:
    """Runs a check; returns its row of the results."""
    print(f"{name} ...", flush=True)
    began = time.monotonic()
    try:
        row: dict[str, Any] = {"verdict": "passed", "numbers": CHECKS[name](stacks)}
    except Failed as error:
        row = {"verdict": "failed", "reason": str(error)}
    row = {"check": name, **row, "seconds": round(time.monotonic() - began, 1), "date": time.strftime("%F")}
    print(f"  {row['verdict']} in {row['seconds']} s: {row.get('numbers') or row['reason']}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"checks to run (default: all): {'; '.join(CHECKS)}")
    parser.add_argument("--other", default=str(ROOT / ".venv/bin/python"), help="Python of the other environment")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: tools/stack/results/stack.json")
    args = parser.parse_args()
    if unknown := set(args.checks) - set(CHECKS):
        parser.error(f"unknown checks: {', '.join(sorted(unknown))}; known: {'; '.join(CHECKS)}")
    last = json.loads(args.results.read_text())["checks"] if args.results.exists() and args.checks else []
    rows = {row["check"]: row for row in last if row["check"] in CHECKS}
    work = Path(tempfile.mkdtemp(prefix="mrl-stack-"))
    try:
        stacks = Stacks(sys.executable, args.other, work, time.monotonic() + LIMIT_S)
        stacks.run(stacks.here, "tools/make_sort_task.py", work / "task")
        other = json.loads(stacks.run(stacks.other, "-c", VERSIONS))
        for name in args.checks or CHECKS:
            rows[name] = run_check(name, stacks)
    finally:
        shutil.rmtree(work)
    figures = {"stack": versions(*PACKAGES), "other": other, "checks": [rows[name] for name in CHECKS if name in rows]}
    record.write(args.results, figures)
    return int(any(row["verdict"] != "passed" for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
