"""Offloading on a GPU: its memory is freed, and the restored tensors are equal bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.world import ROOT, WORLDS, run_world


def on_one_device(model: Path, offload: str) -> dict[str, Any]:
    """Returns the results of tests/worlds/one_memory.py."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{WORLDS}"}
    command = [sys.executable, str(WORLDS / "one_memory.py"), str(model), offload]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_memory_is_given_up_on_the_gpu(offload: str, tiny_models: Callable[..., Path]) -> None:
    found = on_one_device(tiny_models("llama", hidden_size=256, intermediate_size=1024, vocab_size=4096), offload)
    assert found["same"] and found["pinned"]
    slack, held, parts = 1 << 20, found["allocated"], found["parts"]
    of_optimizer = parts["gradients"] + parts["optimizer"]
    assert abs(held["all"] - held["parameters"] - of_optimizer) < slack
    given_up = parts["parameters"] if offload == "all" else 0
    assert abs(held["parameters"] - held["nothing"] - given_up) < slack
    assert abs(held["all again"] - held["all"]) < slack
    assert found["reserved"]["nothing"] < found["reserved"]["all"] - 0.5 * of_optimizer, "torch's cache keeps it"


def test_the_program_of_these_tests_runs_on_a_cpu(tiny_models: Callable[..., Path]) -> None:
    """So that no typo waits for a GPU."""
    found = json.loads(run_world(1, "one_memory.py", tiny_models("llama"), "all").splitlines()[-1])
    assert found["same"] and found["parts"]["gradients"] == 2 * found["parts"]["parameters"]
