"""Compares parallel layouts of two and four ranks that share one GPU with a single rank on it.

Collectives are gloo's, staged through host memory (tools/gpu/staged_collectives.py). Three worlds, of four, two and one
rank, compute everything except the weight sync when the first check needs a result. The world of one rank computes the
references.
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
FOUR = ("tp2.pp2",)  # layouts with four ranks; the others have two
PRECISIONS = ("float32", "bfloat16", "current", "blockwise")
EXACT, REHEARSED_EXACT = 1e-4, 1e-5  # relative, of every tensor in float32 summed in other orders, on GPU and CPU
# Relative errors of the loss, and mean over tensors of the gradients' relative errors. Each layout rounds differently,
# so two layouts differ by up to sqrt(2) times the error of one against float32. For the dense model's gradients,
# emulated on a CPU, that error is 0.03 in bfloat16, 0.25 in `current` and 0.23 in `blockwise`; layouts differed by at
# most 0.02, 0.25 and 0.10. A missing sum over two ranks is an error of 0.5 or more. The bounds of the loss are those of
# the stages transformer_engine and fp8.
ROUNDED = {"bfloat16": (0.02, 0.05), "current": (0.05, 0.4), "blockwise": (0.05, 0.25)}
WORLD_S, REHEARSED_WORLD_S = 150.0, 500.0


def against_one(layout: str, precision: str) -> Check:
    """Returns a check: loss, every gradient, and the weights after an update agree with one rank's."""

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
        loss_limit, gradient_limit = ROUNDED[precision]
        return require(numbers, loss=loss_limit, mean=gradient_limit)

    return check


def resumed(setting: Setting) -> Numbers:
    """Compares two updates by four ranks and two more by one rank with four updates by four ranks."""
    run_worlds(setting)
    got, want = result(setting, "resume:one"), result(setting, "save:tp2.pp2")
    numbers = differences(got["weights"], want["weights"])
    moved = differences(got["before"], want["weights"])["mean"]
    if not moved > 1e-3:
        raise Failed(f"four updates changed the weights by only {moved:.2g}, relative", numbers)
    return require(numbers, worst=REHEARSED_EXACT if setting.rehearsal else EXACT)


def synced(setting: Setting) -> Numbers:
    """Syncs the weights of four ranks after two updates to one SGLang engine on the same GPU, verified by checksum."""
    from mrl.config.derived import Machine
    from mrl.config.schema import RolloutConfig
    from mrl.inference.start import start_engine

    if not has_sglang():
        raise Skipped("sglang is not installed")
    if (problem := unusable(setting, "bfloat16")) is not None:
        raise Skipped(problem)
    work, transport = _models(setting), "shared_memory" if setting.rehearsal else "cuda_ipc"
    args = () if setting.rehearsal else server_args()
    cfg = RolloutConfig(max_context_tokens=64, memory_fraction=0.2, server_args=args)
    machine = Machine(4, 4, gpus=0 if setting.rehearsal else 1, joined=True)
    with start_engine(cfg, str(work / "dense"), "bfloat16", work, machine=machine) as engine:
        engine.wait_ready()
        client = engine.pool.client(engine.urls[0])
        before = client.weights_checksum()[0].checksums
        (work / "engine.json").write_text(json.dumps({"url": engine.urls[0], "key": engine.pool.access.api_key}))
        if error := _run(setting, work, 4, [f"sync:tp2.pp2:{transport}"]):
            raise Failed(error)
        after = client.weights_checksum()[0].checksums
    sync = result(setting, f"sync:tp2.pp2:{transport}")
    numbers = {name: sync[name] for name in ("transport", "tensors", "verified", "bytes", "seconds")}
    numbers["unchanged"] = sum(before[name] == digest for name, digest in after.items())
    if sync["verified"] != sync["tensors"] or sync["transport"] != transport:
        raise Failed("not every tensor was verified", numbers)
    return require(numbers, unchanged=0)


def unusable(setting: Setting, precision: str) -> str | None:
    """Returns why this machine cannot compute in `precision`, or None. A rehearsal uses local layers, emulated fp8."""
    from mrl import platform

    if setting.rehearsal or precision == "float32":
        return None
    problem = platform.transformer_engine_problem()
    if problem is not None or precision == "bfloat16":
        return problem and f"transformer-engine: {problem}"
    return platform.fp8_problem(precision)


def differences(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> Numbers:
    """Returns the mean of the tensors' relative errors in Frobenius norm, and the largest one with its name."""
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
    """Runs the worlds that have not run.

    A world that fails raises nothing here: each check reports its missing result.
    """
    precisions = [name for name in precisions if unusable(setting, name) is None]
    cases: dict[int, list[str]] = {4: [], 2: [], 1: []}  # one rank resumes from a checkpoint of four
    for precision in precisions:
        for layout in layouts:
            cases[4 if layout in FOUR else 2].append(f"{model_of(layout)}:{layout}:{precision}")
        cases[1] += [f"{model}:one:{precision}" for model in sorted({model_of(layout) for layout in layouts})]
    if cases[4]:
        cases[4].insert(0, "save:tp2.pp2")
        cases[1].append("resume:one")
    for ranks, of_world in cases.items():
        if not _error_file(setting, ranks).is_file():
            work = _models(setting)
            _error_file(setting, ranks).write_text(_run(setting, work, ranks, of_world) if of_world else "")


def result(setting: Setting, case: str) -> dict[str, Any]:
    """Returns the result of a case. Raises Failed with the ends of the worlds' stderr if it does not exist."""
    file = setting.work / "ranks" / f"{case}.pt"
    if not file.is_file():
        errors = [_error_file(setting, ranks) for ranks in (4, 2, 1)]
        raise Failed(f"{case} was not computed: " + "; ".join(file.read_text() for file in errors if file.is_file()))
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return loaded


def model_of(layout: str) -> str:
    return "moe" if layout.startswith("ep") else "dense"


def _run(setting: Setting, work: Path, ranks: int, cases: Sequence[str]) -> str:
    """Runs a world; returns why it failed, or an empty text."""
    gpu = "" if setting.rehearsal else os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # NVML: the imports before the fork must not initialise CUDA
    own = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "CUDA_VISIBLE_DEVICES": gpu}
    limit_s = REHEARSED_WORLD_S if setting.rehearsal else WORLD_S
    command = [sys.executable, "-m", "tests.worlds.forked", str(ranks), str(WORLDS / "staged_ranks.py"), str(work)]
    process = subprocess.Popen([*command, *cases], cwd=ROOT, env=environment() | own, stderr=subprocess.PIPE, text=True)
    try:
        _, errors = process.communicate(timeout=limit_s)
        return "" if process.returncode == 0 else f"{ranks} ranks: {errors.strip()[-500:]}"
    except subprocess.TimeoutExpired:
        return f"{ranks} ranks did not end within {limit_s:g} s"
    finally:
        process.kill()  # this also ends its ranks
        process.wait()


def _error_file(setting: Setting, ranks: int) -> Path:
    return setting.work / "ranks" / f"{ranks} ranks.txt"


def _models(setting: Setting) -> Path:
    """Returns the directory of both models. On a GPU, 128 divides every width on a rank, as fp8 blocks require."""
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
