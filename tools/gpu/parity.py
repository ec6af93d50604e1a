"""Compares what a family's model computes on the GPU, in its own process, with the same model in float32 on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tools.gpu.stage import ROOT, Check, Failed, Numbers, Setting, Skipped, require

FUSABLE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
FAMILIES = (*FUSABLE, "deepseek_v3", "gemma3_text", "olmo2", "olmo3", "smollm3", "gpt_oss")
REHEARSED = "qwen3_moe"
EXACT = 1e-4  # largest difference relative to the largest value; both in float32, summed in different orders
# Mean difference relative to the largest value, in bfloat16; on a CPU it is up to 0.03, with experts 0.05. The largest
# difference would say little: a rounded router sends some tokens to other experts.
ROUNDED = 0.1
WORLDS = ROOT / "tests" / "worlds"
AT_ONCE = min(12, max(2, os.cpu_count() or 2))  # processes; most of their time is imports
PROCESS_S = 120


@dataclass(frozen=True)
class Backend:
    """Device, dtype and layers that compute a model. number: of the run, for a backend that runs twice"""

    gpu: bool = True
    dtype: str = "float32"
    layers: str = "auto"
    fixed_order: bool = False
    number: int = 1


CPU = Backend(gpu=False)
GPU = Backend()
LOCAL = Backend(dtype="bfloat16", layers="local")
FUSED = Backend(dtype="bfloat16", layers="transformer_engine")
FIXED = replace(LOCAL, fixed_order=True)
AGAIN = replace(FIXED, number=2)


def differences(got: dict[str, Any], want: dict[str, Any], rounded: bool = False) -> dict[str, float]:
    """Returns the largest difference of each part, relative to the part's largest value.

    Args:
        rounded: take the mean difference instead
    """

    def difference(a: torch.Tensor, b: torch.Tensor) -> float:
        gap = (a - b).abs()
        return float((gap.mean() if rounded else gap.max()) / b.abs().max().clamp(min=1e-6))

    outputs = want["outputs"]
    numbers = {name: difference(got["outputs"][name], outputs[name]) for name in outputs if name != "values"}
    for role in ("actor", "critic"):
        numbers[f"{role} loss"] = abs(got[role]["loss"] - want[role]["loss"]) / max(1.0, abs(want[role]["loss"]))
        numbers[f"{role} gradients"] = abs(got[role]["grad_norm"] / want[role]["grad_norm"] - 1)
        weights = want[role]["weights"]
        numbers[f"{role} weights"] = max(difference(got[role]["weights"][name], weights[name]) for name in weights)
    return numbers


def parity(family: str, backend: Backend) -> Check:
    """Returns a check: log-probs, losses, gradients and updated weights equal those of the CPU in float32."""

    def check(setting: Setting) -> Numbers:
        if setting.rehearsal and (family, backend) != (REHEARSED, LOCAL):
            raise Skipped("a rehearsal looks at one family")
        exact, got = results(setting, family, [CPU, backend])
        if backend.layers not in ("auto", got["layers"]):
            raise Failed(f"the model used layers: {got['layers']}, not {backend.layers}")
        return compared(got, exact, rounded=backend.dtype != "float32")

    return check


def compared(got: dict[str, Any], exact: dict[str, Any], rounded: bool) -> Numbers:
    """Returns the differences. Raises Failed if the largest exceeds its limit."""
    numbers = differences(got, exact, rounded)
    name = max(numbers, key=lambda part: numbers[part])
    return require({"worst": numbers[name], "of": name, **numbers}, worst=ROUNDED if rounded else EXACT)


def same_bits(setting: Setting) -> Numbers:
    """Two runs with run.deterministic give equal bits. A rehearsal compares with a run without it, equal on a CPU."""
    numbers = differences(*results(setting, REHEARSED, [LOCAL if setting.rehearsal else AGAIN, FIXED]))
    return require({"differences": sum(value != 0 for value in numbers.values())}, differences=0)


def processes(families: Sequence[str], backends: Sequence[Backend]) -> Check:
    """Returns a check that runs the processes of the next checks, several at once.

    A process that fails raises nothing here: the checks that need its results report the failure.
    """

    def check(setting: Setting) -> Numbers:
        if setting.rehearsal:
            _run(setting, REHEARSED, [CPU, LOCAL, FIXED])
            return {"families": 1}
        for family in families:
            _model(setting, family)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda family: _compute_missing(setting, family, backends), families))
        return {"families": len(families)}

    return check


def results(setting: Setting, family: str, backends: Sequence[Backend]) -> list[dict[str, Any]]:
    """Returns one result per backend. Raises Failed with the end of stderr of a process that failed."""
    _compute_missing(setting, family, backends)
    if errors := [text for backend in backends if (text := _error_file(setting, family, backend).read_text())]:
        raise Failed(errors[0])
    return [torch.load(_result_file(setting, family, backend), weights_only=True) for backend in backends]


def _compute_missing(setting: Setting, family: str, backends: Sequence[Backend]) -> None:
    """Computes the results that do not exist yet: one process for those on the CPU, one for those on the GPU."""
    missing = [backend for backend in backends if not _error_file(setting, family, backend).is_file()]
    for gpu in (False, True):
        if same_device := [backend for backend in missing if backend.gpu == gpu]:
            _run(setting, family, same_device)


def _run(setting: Setting, family: str, backends: Sequence[Backend]) -> None:
    """Runs tests/worlds/one_update.py. Writes an error file per backend, empty if the backend has a result.

    Backends with `fixed_order` come last, because that setting stays on for the rest of the process.
    """
    path = os.pathsep.join([str(ROOT), str(WORLDS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    if not any(backend.gpu for backend in backends):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(WORLDS / "one_update.py"), str(_model(setting, family))]
    for backend in backends:
        order = "fixed" if backend.fixed_order else "any"
        command += [str(_result_file(setting, family, backend)), backend.dtype, backend.layers, order]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_S, cwd=ROOT)
        error = f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
    except subprocess.TimeoutExpired:
        error = f"did not end within {PROCESS_S} s"
    for backend in backends:
        has_result = _result_file(setting, family, backend).is_file()
        _error_file(setting, family, backend).write_text("" if has_result else error)


def _result_file(setting: Setting, family: str, backend: Backend) -> Path:
    device, order = "gpu" if backend.gpu else "cpu", "fixed" if backend.fixed_order else "any"
    return setting.work / f"{family}_{device}_{backend.dtype}_{backend.layers}_{order}_{backend.number}.pt"


def _error_file(setting: Setting, family: str, backend: Backend) -> Path:
    return _result_file(setting, family, backend).with_suffix(".txt")


def _model(setting: Setting, family: str) -> Path:
    """Returns the directory of a tiny random model that is wide enough for GPU kernels."""
    from tests.helpers.tiny import make_tiny

    model = setting.work / family
    if not (model / "config.json").is_file():
        make_tiny(model, family, hidden_size=128, intermediate_size=256)
    return model
