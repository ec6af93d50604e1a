"""What a family's model computes on the GPU, in a process of its own, against the same in float32 on the CPU."""

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
EXACT = 1e-4  # the largest difference, of the largest value; float32 on both, in other orders
# The mean difference, of the largest value, in bfloat16; on a CPU up to 0.03, with experts 0.05. The largest difference
# would say little: a router that is rounded sends some tokens to other experts.
ROUNDED = 0.1
WORLDS = ROOT / "tests" / "worlds"
AT_ONCE = min(12, max(2, os.cpu_count() or 2))  # processes, which mostly import
PROCESS_S = 120


@dataclass(frozen=True)
class Way:
    """How a model is computed: where, in which type, with which layers, and for which time."""

    gpu: bool = True
    dtype: str = "float32"
    layers: str = "auto"
    fixed_order: bool = False
    time: int = 1


CPU = Way(gpu=False)
GPU = Way()
LOCAL = Way(dtype="bfloat16", layers="local")
FUSED = Way(dtype="bfloat16", layers="transformer_engine")
FIXED = replace(LOCAL, fixed_order=True)
AGAIN = replace(FIXED, time=2)


def differences(got: dict[str, Any], want: dict[str, Any], rounded: bool = False) -> dict[str, float]:
    """The largest difference of each part, over its largest value. rounded: the mean difference."""

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        gap = (a - b).abs()
        return float((gap.mean() if rounded else gap.max()) / b.abs().max().clamp(min=1e-6))

    found = {name: apart(got["outputs"][name], value) for name, value in want["outputs"].items() if name != "values"}
    for role in ("actor", "critic"):
        found[f"{role} loss"] = abs(got[role]["loss"] - want[role]["loss"]) / max(1.0, abs(want[role]["loss"]))
        found[f"{role} gradients"] = abs(got[role]["grad_norm"] / want[role]["grad_norm"] - 1)
        weights = want[role]["weights"]
        found[f"{role} weights"] = max(apart(got[role]["weights"][name], weights[name]) for name in weights)
    return found


def parity(family: str, way: Way) -> Check:
    """A check that the family's log-probs, losses, gradients and updated weights are the CPU's in float32."""

    def check(setting: Setting) -> Numbers:
        if setting.rehearsal and (family, way) != (REHEARSED, LOCAL):
            raise Skipped("a rehearsal looks at one family")
        exact, found = results(setting, family, [CPU, way])
        if way.layers not in ("auto", found["layers"]):
            raise Failed(f"its layers were {found['layers']}")
        return judged(found, exact, rounded=way.dtype != "float32")

    return check


def judged(found: dict[str, Any], exact: dict[str, Any], rounded: bool) -> Numbers:
    numbers = differences(found, exact, rounded)
    name = max(numbers, key=lambda part: numbers[part])
    return require({"worst": numbers[name], "of": name, **numbers}, worst=ROUNDED if rounded else EXACT)


def same_bits(setting: Setting) -> Numbers:
    """With run.deterministic, twice; on a CPU once without it, since it changes nothing there."""
    numbers = differences(*results(setting, REHEARSED, [LOCAL if setting.rehearsal else AGAIN, FIXED]))
    return require({"differences": sum(value != 0 for value in numbers.values())}, differences=0)


def processes(families: Sequence[str], ways: Sequence[Way]) -> Check:
    """Starts the worlds of the next checks, several at once. A world that fails raises nothing here: the checks that
    need its results report that."""

    def check(setting: Setting) -> Numbers:
        if setting.rehearsal:
            _run(setting, REHEARSED, [CPU, LOCAL, FIXED])
            return {"families": 1}
        for family in families:
            _model(setting, family)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda family: _make(setting, family, ways), families))
        return {"families": len(families)}

    return check


def results(setting: Setting, family: str, ways: Sequence[Way]) -> list[dict[str, Any]]:
    """A result a way. Failed, with the last words of the process that should have made it."""
    _make(setting, family, ways)
    if failed := [said for way in ways if (said := _said(setting, family, way).read_text())]:
        raise Failed(failed[0])
    return [torch.load(_out(setting, family, way), weights_only=True) for way in ways]


def _make(setting: Setting, family: str, ways: Sequence[Way]) -> None:
    """A process for the CPU's results and one for the GPU's, of those that are not there."""
    for gpu in (False, True):
        missing = [way for way in ways if way.gpu == gpu and not _said(setting, family, way).is_file()]
        if missing:
            _run(setting, family, missing)


def _run(setting: Setting, family: str, ways: Sequence[Way]) -> None:
    """tests/worlds/one_update.py. What it said goes beside each result that it did not make, nothing beside others.
    ways: those with a fixed order last, which stays"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_path())}
    if not any(way.gpu for way in ways):
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(WORLDS / "one_update.py"), str(_model(setting, family))]
    for way in ways:
        command += [str(_out(setting, family, way)), way.dtype, way.layers, "fixed" if way.fixed_order else "any"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_S, cwd=ROOT)
        said = f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
    except subprocess.TimeoutExpired:
        said = f"did not end within {PROCESS_S} s"
    for way in ways:
        _said(setting, family, way).write_text("" if _out(setting, family, way).is_file() else said)


def _path() -> list[str]:
    return [str(ROOT), str(WORLDS), *filter(None, [os.environ.get("PYTHONPATH")])]


def _out(setting: Setting, family: str, way: Way) -> Path:
    order = "fixed" if way.fixed_order else "any"
    return setting.work / f"{family}_{'gpu' if way.gpu else 'cpu'}_{way.dtype}_{way.layers}_{order}_{way.time}.pt"


def _said(setting: Setting, family: str, way: Way) -> Path:
    return _out(setting, family, way).with_suffix(".txt")


def _model(setting: Setting, family: str) -> Path:
    """A tiny random model, wide enough for the kernels of GPUs."""
    from tests.helpers.tiny import make_tiny

    model = setting.work / family
    if not (model / "config.json").is_file():
        make_tiny(model, family, hidden_size=128, intermediate_size=256)
    return model
