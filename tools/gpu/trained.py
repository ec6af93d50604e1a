"""Short single-process runs of `mrl train` from the configurations in yaml_configs/, and numbers from their metrics."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools import make_sort_task
from tools.gpu.stage import ROOT, Failed, Numbers, Setting, Skipped

Row = dict[str, Any]
ALONE = ("run.nproc=1", "run.trackers=[]", "run.timeout_s=120")
ONE_RANK = (*ALONE, "validation.at_start=false")


def task(setting: Setting, sizes: str | None = None) -> Path:
    """Returns a directory with the sorting task's data and model_init, with the sizes of yaml_configs/models/SIZES."""
    out = setting.work / f"task {sizes or 'tiny'}"
    if not (out / "data" / "train.jsonl").is_file():
        config = None if sizes is None else ROOT / "yaml_configs" / "models" / sizes / "config.json"
        digits, rows, held_out = (2, 60, 20) if setting.rehearsal else (5, 20000, 512)
        make_sort_task.write_model(out / "model_init", config)
        make_sort_task.write_data(out / "data", digits, rows, held_out, seed=0)
    return out


def with_weights(sizes: Path, out: Path) -> Path:
    """Copies the model directory `sizes` to `out`, adds random weights in bfloat16, and returns `out`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not out.is_dir():
        shutil.copytree(sizes, out)
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(sizes)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)
    return out


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}


def data_overrides(task_dir: Path) -> list[str]:
    return [f"data.train={task_dir}/data/train.jsonl", f"data.validation={task_dir}/data/validation.jsonl"]


def train(
    setting: Setting, name: str, config: str, overrides: Sequence[str], limit_s: float, gpus: int = 1
) -> list[Row]:
    """Runs `mrl train` on yaml_configs/CONFIG.yaml and returns its metrics, one row per step.

    A rehearsal only checks the configuration for a machine with that many GPUs, and raises Skipped.

    Raises:
        Failed: with the end of the run's output
    """
    overrides = [f"run.name={name}", f"run.root={setting.work}/runs", *overrides]
    if setting.rehearsal:
        _check_config(config, overrides, gpus)
        raise Skipped("a rehearsal reads its configuration alone")
    return run_train(setting, name, config, overrides, limit_s)


def run_train(setting: Setting, name: str, config: str, overrides: Sequence[str], limit_s: float) -> list[Row]:
    command = [sys.executable, "-m", "mrl", "train", f"yaml_configs/{config}.yaml", *overrides]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as timeout:
        output = timeout.stdout.decode(errors="replace") if isinstance(timeout.stdout, bytes) else timeout.stdout or ""
        raise Failed(f"{config} did not end within {limit_s:g} s: {output[-400:]}") from None
    if done.returncode:
        print(done.stdout[-6000:], flush=True)
        raise Failed(f"{config} ended with exit code {done.returncode}: {done.stdout.strip()[-500:]}")
    file = setting.work / "runs" / name / "metrics.jsonl"
    return [row for row in map(json.loads, file.read_text().splitlines()) if row["step"] > 0]


def _check_config(config: str, overrides: Sequence[str], gpus: int) -> None:
    from mrl.config.loader import ConfigError, load

    try:
        load(ROOT / "yaml_configs" / f"{config}.yaml", overrides, gpus=gpus)
    except ConfigError as error:
        from_runs = [p for p in error.problems if "/hf" in p.message and p.keys[0] == "model.path"]
        if len(from_runs) < len(error.problems):  # a rehearsal has no models that other runs export
            raise Failed(str(error)) from None


def training_numbers(rows: Sequence[Row]) -> Numbers:
    """Returns the losses and the speed of a run. Raises Failed if an update was skipped."""
    numbers = {
        "steps": len(rows),
        "first loss": rows[0]["actor/loss"],
        "last loss": rows[-1]["actor/loss"],
    }
    if "perf/tokens_per_s" in rows[-1]:  # absent for diffusion
        numbers["tokens/s"] = max(row["perf/tokens_per_s"] for row in rows)
    if skipped := sum(row["actor/skipped"] for row in rows):
        raise Failed(f"{skipped:g} updates were skipped: a loss or gradient was not finite", numbers)
    return numbers


def rollout_numbers(rows: Sequence[Row]) -> Numbers:
    """Returns training_numbers of a run with an engine, its mismatch in nats per token, rewards, last step's times."""
    last = rows[-1]
    return training_numbers(rows) | {
        "mismatch_mean": max(row["mismatch/mean_abs"] for row in rows),
        "mismatch_max": max(row["mismatch/max_abs"] for row in rows),
        "first reward": rows[0]["reward/mean"],
        "last reward": last["reward/mean"],
        **{f"{name.removeprefix('time/')} s": value for name, value in last.items() if name.startswith("time/")},
    }
