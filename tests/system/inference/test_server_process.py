"""Processes of the SGLang server on CPUs."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config.schema import RolloutConfig
from mrl.inference.errors import EngineUnavailable
from mrl.inference.launch import CPU
from mrl.inference.sglang.command import SHIM
from mrl.inference.sglang.cpu_shim.mrl_cpu_engine import adaptations
from tests.conftest import TinyModels
from tests.unit.inference.test_rollout_units import launch


def test_the_shim_stays_out_of_the_way_of_the_real_packages(tmp_path: Path, tiny_models: TinyModels) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("real = True\n")
    env = {**os.environ, "PYTHONPATH": f"{SHIM}{os.pathsep}{tmp_path}"}
    code = "import triton; assert triton.real\ntry: import torchvision\nexcept ImportError: print('untouched')"
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert out.stdout.strip() == "untouched", out.stderr
    assert "not active, because triton is installed" in out.stderr
    sys.path.insert(0, str(tmp_path))
    try:
        with pytest.raises(EngineUnavailable, match="no GPU is visible, and triton is installed"):
            launch(RolloutConfig(), str(tiny_models("llama")), "float32", 8000, 0, 0, CPU, folder=tmp_path)
    finally:
        sys.path.remove(str(tmp_path))


def test_the_server_forks_with_garbage_collected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "set_start_method", lambda method, force: methods.append(method))
    methods: list[str] = []
    gc.disable()
    try:
        adaptations._fork_instead_of_spawn(adaptations)
        multiprocessing.set_start_method("spawn", force=True)
        assert methods == ["fork"] and gc.isenabled() and gc.get_freeze_count()
    finally:
        gc.unfreeze()
        gc.enable()
