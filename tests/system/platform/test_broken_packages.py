"""Packages that are only partly installed, each tested in its own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import fake_te
from tests.helpers.python_process import run_python

# CUDA is imitated after `install`, which adapts to this machine and would hide GPU packages
WHERE = {"MRL_PLATFORM_OFF": "te_without_gpu"}
OFTEN = "versions that differ"
FAULTS = [OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in fake_te.BROKEN if name != OFTEN)]

ASK = """
from mrl import platform; platform.install()
import torch; torch.cuda.is_available = lambda: True
print(platform.transformer_engine_usable(), platform.transformer_engine_problem())
import megatron.core.extensions.transformer_engine as te, megatron.core.transformer.mlp as mlp
print(te.HAVE_TE, mlp.HAVE_TE)
print({feature.part: feature.problem for feature in platform.features()}["transformer-engine"])
"""


@pytest.mark.slow
def test_a_whole_package_is_usable(tmp_path: Path) -> None:
    done = run_python(ASK, path=fake_te.make(tmp_path), **WHERE)
    assert done.stdout.splitlines() == ["True None", "True True", "None"], done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_package_is_not_usable_and_megatron_does_not_believe_in_it(name: str, tmp_path: Path) -> None:
    source, says = fake_te.BROKEN[name]
    done = run_python(ASK, path=fake_te.make(tmp_path, source), **WHERE)
    assert done.stdout.splitlines() == [f"False {says}", "False False", says], done.stderr


@pytest.mark.slow
def test_an_apex_without_its_kernel_is_not_usable(tmp_path: Path) -> None:
    """An apex without kernels is not usable. PyPI's is another program; a build without CUDA has none."""
    (tmp_path / "apex.py").write_text("")
    code = (
        "import torch; torch.cuda.is_available = lambda: True\nfrom mrl import platform; print(platform.apex_usable())"
    )
    assert run_python(code, path=tmp_path).stdout.split() == ["False"]
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("")
    assert run_python(code, path=tmp_path).stdout.split() == ["True"]


START = """
import torch
torch.cuda.is_available = lambda: True
from types import SimpleNamespace
from mrl.preflight.machine import check_layers
from mrl.config.schema import TrainConfig
from mrl.config.trainers.base import ModelUse
for name in ("auto", "transformer_engine"):
    use = ModelUse(train=TrainConfig(layers=name))
    print([f.text for f in check_layers(SimpleNamespace(models=lambda: {"actor": use}))])
"""


def test_a_broken_package_is_told_before_the_start(tmp_path: Path) -> None:
    source, says = fake_te.BROKEN[OFTEN]
    path = fake_te.make(tmp_path, source)
    done = run_python(START, path=path)
    nothing, told = done.stdout.splitlines()
    assert nothing == "[]" and f"actor.layers: transformer_engine cannot be used here: {says}" in told, done.stderr
