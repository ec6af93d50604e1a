"""Parallel layouts of two and four ranks that share one card, against one rank on it.

Collectives are gloo's, staged through host memory (tools/gpu/staged_collectives.py). Three worlds compute everything
but the weight sync, at the first check that asks: of four ranks, of two, and of one, which has the references.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tools.gpu.parity import WORLDS
from tools.gpu.stage import ROOT, Check, Failed, Numbers, Setting, Skipped, require
from tools.gpu.stage_engine import has_sglang, server_args
from tools.gpu.trained import environment

LAYOUTS = {
    "TP2 with SP": "tp2",
    "PP2": "pp2",
    "CP2": "cp2",
    "EP2": "ep2",
    "DP2 with a sharded optimizer": "dp2",
    "TP2 x PP2": "tp2.pp2",
}
FOUR = ("tp2.pp2",)  # ranks; the others have two
PRECISIONS = ("float32", "bfloat16", "current", "blockwise")
EXACT, REHEARSED_EXACT = 1e-4, 1e-5  # relative, of every tensor; float32 in other orders, on a GPU and on a CPU
# Relative errors of the loss, and of gradients in the mean over tensors. Another layout is another rounding: sqrt(2)
# times the error of one against float32. Of the dense model's gradients that error is 0.03 in bfloat16, 0.25 in
# `current` and 0.23 in `blockwise`, emulated on a CPU; there layouts were at most 0.02, 0.25 and 0.10 apart. A sum over
# two ranks that is missing is off by 0.5 or more. The bounds of the loss are those of the stages transformer_engine and
# fp8.
ROUNDED = {"bfloat16": (0.02, 0.05), "current": (0.05, 0.4), "blockwise": (0.05, 0.25)}
WORLD_S, REHEARSED_WORLD_S = 150.0, 500.0


def against_one(layout: str, precision: str) -> Check:
    """Loss, every gradient, and the weights after an update."""

    def check(setting: Setting) -> Numbers:
        if (problem := unusable(setting, precision)) is not None:
            raise Skipped(problem)
        run_worlds(setting)
        model = model_of(layout)
        got, want = (result(setting, f"{model}:{name}:{precision}") for name in (layout, "one"))
        exact = REHEARSED_EXACT if setting.rehearsal else EXACT
        numbers = {"loss": abs(got["loss"] / want["loss"] - 1), **differences(got["gradients"], want["gradients"])}
        numbers["weights"] = differences(got["weights"], want["weights"])["worst"]
        if precision == "float32":
            return require(numbers, loss=exact, worst=exact, weights=exact)
        of_loss, of_gradients = ROUNDED[precision]
        return require(numbers, loss=of_loss, mean=of_gradients)

    return check


def resumed(setting: Setting) -> Numbers:
    """Two updates of four ranks and two more by one rank, against four updates of four ranks."""
    run_worlds(setting)
    got, want = result(setting, "resume:one"), result(setting, "save:tp2.pp2")
    numbers = differences(got["weights"], want["weights"])
    moved = differences(got["before"], want["weights"])["mean"]
    if not moved > 1e-3:
        raise Failed(f"four updates have moved the weights by {moved:.2g} only", numbers)
    return require(numbers, worst=REHEARSED_EXACT if setting.rehearsal else EXACT)


def synced(setting: Setting) -> Numbers:
    """Four ranks send their weights after two updates to one SGLang on the same card; the checksum is the engine's."""
    from mrl.config.derived import Machine
    from mrl.config.schema import RolloutConfig
    from mrl.inference.start import start_engine

    if not has_sglang():
        raise Skipped("sglang is not installed")
    if (problem := unusable(setting, "bfloat16")) is not None:
        raise Skipped(problem)
    work, transport = _models(setting), "shared_memory" if setting.rehearsal else "cuda_ipc"
    own = () if setting.rehearsal else server_args()
    cfg = RolloutConfig(max_context_tokens=64, memory_fraction=0.2, server_args=own)
    machine = Machine(4, 4, gpus=0 if setting.rehearsal else 1, joined=True)
    with start_engine(cfg, str(work / "dense"), "bfloat16", work, machine=machine) as engine:
        engine.wait_ready()
        client = engine.pool.client(engine.urls[0])
        before = client.weights_checksum()[0].checksums
        (work / "engine.json").write_text(json.dumps({"url": engine.urls[0], "key": engine.pool.access.api_key}))
        if failed := _run(setting, work, 4, [f"sync:tp2.pp2:{transport}"]):
            raise Failed(failed)
        after = client.weights_checksum()[0].checksums
    found = result(setting, f"sync:tp2.pp2:{transport}")
    numbers = {name: found[name] for name in ("transport", "tensors", "verified", "bytes", "seconds")}
    numbers["unchanged"] = sum(before[name] == digest for name, digest in after.items())
    if found["verified"] != found["tensors"] or found["transport"] != transport:
        raise Failed("not every tensor was verified", numbers)
    return require(numbers, unchanged=0)


def unusable(setting: Setting, precision: str) -> str | None:
    """Why this machine cannot compute it. In a rehearsal layers are local and fp8 is emulated."""
    from mrl import platform

    if setting.rehearsal or precision == "float32":
        return None
    problem = platform.transformer_engine_problem()
    if problem is not None or precision == "bfloat16":
        return problem and f"transformer-engine: {problem}"
    return platform.fp8_problem(precision)


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> Numbers:
    """Relative errors of tensors, by Frobenius norms: their mean, and the worst one with its name."""
    if got.keys() != want.keys():
        raise Failed(f"only one side has {sorted(got.keys() ^ want.keys())[:3]}")
    errors = {name: relative_error(got[name].double(), tensor.double()) for name, tensor in want.items()}
    worst = max(errors, key=lambda name: errors[name])
    return {"mean": statistics.fmean(errors.values()), "worst": errors[worst], "of": worst}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / (want.norm() + 1e-9))


def run_worlds(
    setting: Setting, layouts: Sequence[str] = tuple(LAYOUTS.values()), precisions: Sequence[str] = PRECISIONS
) -> None:
    """Runs the worlds that have not run. A world that fails raises nothing here: each check reports its missing
    result."""
    precisions = [name for name in precisions if unusable(setting, name) is None]
    cases: dict[int, list[str]] = {4: [], 2: [], 1: []}  # the last one goes on from a checkpoint of the first
    for precision in precisions:
        for layout in layouts:
            cases[4 if layout in FOUR else 2].append(f"{model_of(layout)}:{layout}:{precision}")
        cases[1] += [f"{model}:one:{precision}" for model in sorted({model_of(layout) for layout in layouts})]
    if cases[4]:
        cases[4].insert(0, "save:tp2.pp2")
        cases[1].append("resume:one")
    for ranks, some in cases.items():
        if not _said(setting, ranks).is_file():
            work = _models(setting)
            _said(setting, ranks).write_text(_run(setting, work, ranks, some) if some else "")


def result(setting: Setting, case: str) -> dict[str, Any]:
    """Failed, with the last words of the worlds, if it is not there."""
    file = setting.work / "ranks" / f"{case}.pt"
    if not file.is_file():
        said = [_said(setting, ranks) for ranks in (4, 2, 1)]
        raise Failed(f"{case} was not computed: " + "; ".join(file.read_text() for file in said if file.is_file()))
    found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return found


def model_of(layout: str) -> str:
    return "moe" if layout.startswith("ep") else "dense"


def _run(setting: Setting, work: Path, ranks: int, cases: Sequence[str]) -> str:
    """Returns why the world failed, or nothing."""
    own = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # imports, before the fork, start no CUDA
    own["CUDA_VISIBLE_DEVICES"] = "" if setting.rehearsal else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    limit_s = REHEARSED_WORLD_S if setting.rehearsal else WORLD_S
    command = [sys.executable, "-m", "tests.worlds.forked", str(ranks), str(WORLDS / "staged_ranks.py"), str(work)]
    process = subprocess.Popen([*command, *cases], cwd=ROOT, env=environment() | own, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=limit_s)
        return "" if process.returncode == 0 else f"{ranks} ranks: {errors.strip()[-500:]}"
    except subprocess.TimeoutExpired:
        return f"{ranks} ranks did not end within {limit_s:g} s"
    finally:
        process.kill()  # its ranks die with it
        process.wait()


def _said(setting: Setting, ranks: int) -> Path:
    return setting.work / "ranks" / f"{ranks} ranks.txt"


def _models(setting: Setting) -> Path:
    """The directory of both models; on a GPU blocks of 128 divide every width of a rank, as fp8 requires."""
    from tests.helpers.tiny import make_tiny

    work = setting.work / "ranks"
    wide: dict[str, int] = {} if setting.rehearsal else {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
    if not (work / "moe").is_dir():
        make_tiny(work / "dense", "qwen3", **wide)
        make_tiny(work / "moe", "qwen3_moe", **wide | ({"moe_intermediate_size": 256} if wide else {}))
    return work


CHECKS: dict[str, Check] = {
    **{
        f"{precision} agrees with one rank: {name}": against_one(layout, precision)
        for precision in PRECISIONS
        for name, layout in LAYOUTS.items()
    },
    "a checkpoint of TP2 x PP2 goes on with one rank": resumed,
    "weights of TP2 x PP2 reach one SGLang by CUDA IPC, with checksum": synced,
}
