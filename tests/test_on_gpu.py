"""What only a GPU can tell: that models compute there what they compute on a CPU, with either kind of layer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl import platform
from tests.world import ROOT, WORLDS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
EXACT = 1e-4  # of the largest value; float32 on both, in other orders
ROUNDED = 5e-2  # bfloat16
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def one_update(
    model: Path, out: Path, dtype: str = "float32", layers: str = "auto", gpu: bool = True
) -> dict[str, Any]:
    """What tests/worlds/one_update.py finds, in a process that sees a GPU or none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{WORLDS}"}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(WORLDS / "one_update.py"), str(model), str(out), dtype, layers]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=True)


def worst(got: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each part, over its largest value."""

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))

    found = {name: apart(got["outputs"][name], value) for name, value in want["outputs"].items() if name != "values"}
    for role in ("actor", "critic"):
        found[f"{role} loss"] = abs(got[role]["loss"] - want[role]["loss"]) / max(1.0, abs(want[role]["loss"]))
        found[f"{role} gradients"] = abs(got[role]["grad_norm"] / want[role]["grad_norm"] - 1)
        weights = want[role]["weights"]
        found[f"{role} weights"] = max(apart(got[role]["weights"][name], weights[name]) for name in weights)
    return found


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_the_cpu_s(family: str, tiny_models: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_models(family)
    here, there = (one_update(model, tmp_path / str(gpu), gpu=gpu) for gpu in (False, True))
    assert there["layers"] == "local", "transformer-engine would compute in TF32"
    assert max(worst(there, here).values()) < EXACT, worst(there, here)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layers", ["local", "transformer_engine"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_near(family: str, layers: str, tiny_models: Callable[..., Path], tmp_path: Path) -> None:
    problem = platform.transformer_engine_problem()
    if layers == "transformer_engine" and problem is not None:
        pytest.skip(f"transformer-engine: {problem}")
    model = tiny_models(family, hidden_size=128, intermediate_size=256)
    exact = one_update(model, tmp_path / "exact", gpu=False)
    found = one_update(model, tmp_path / "found", "bfloat16", layers)
    assert found["layers"] == layers
    assert max(worst(found, exact).values()) < ROUNDED, worst(found, exact)


def test_the_program_of_these_tests_runs_on_a_cpu(tiny_models: Callable[..., Path], tmp_path: Path) -> None:
    """So that no typo waits for a GPU."""
    found = one_update(tiny_models("qwen3_moe"), tmp_path / "found", "bfloat16", gpu=False)
    assert found["layers"] == "local"
    assert set(worst(found, found).values()) == {0.0}
    assert found["actor"]["grad_norm"] > 0 < found["critic"]["grad_norm"]
