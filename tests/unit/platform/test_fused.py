"""Usable fused packages: they are distinguished from packages that only look like them, once, with a reason."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl import platform
from mrl.kernels import triton_support
from mrl.platform import fused
from mrl.platform.features import _gpu_tests


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Imitates a machine with CUDA and clears the cached result before and after."""
    platform.install()  # with the adaptations of this machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fused.transformer_engine_problem.cache_clear()
    yield
    fused.transformer_engine_problem.cache_clear()


def test_a_machine_is_asked_once(with_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is looked for once. Python does not cache that a package is absent, and every micro-batch asks."""
    asked: list[str] = []
    monkeypatch.setattr(fused, "import_problem", lambda module: asked.append(module) or "absent")
    assert [platform.transformer_engine_usable() for _ in range(3)] == [False] * 3
    assert asked == [fused.TRANSFORMER_ENGINE]


def test_a_package_that_megatron_does_not_know_is_not_usable(with_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "import_problem", lambda module: None)
    for known, problem in ((False, "megatron-core does not support its version"), (True, None)):
        monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", known)
        fused.transformer_engine_problem.cache_clear()
        assert platform.transformer_engine_problem() == problem


def test_doctor_misses_the_compiler_that_triton_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.metadata.version", lambda package: "1.0")  # as if it were installed
    rows = {feature.part: feature.problem for feature in platform.features()}
    assert "no C compiler (cc, gcc or clang)" in (rows["triton"] or "")
    monkeypatch.setenv("CC", "/bin/true")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "Python.h is missing" in (triton_support.compiler_problem() or "")
    (tmp_path / "Python.h").touch()
    assert triton_support.compiler_problem() is None


@pytest.mark.parametrize(
    ("cuda", "fused_layers", "sglang", "stages", "left_out"),
    [
        (False, False, True, None, "no GPU: it has nothing to test here"),
        (
            True,
            False,
            False,
            "cuda, engine, trainers, speed, ranks",
            "skipped here: transformer_engine, fp8, real, engine's checks of SGLang",
        ),
        (
            True,
            True,
            True,
            "cuda, engine, transformer_engine, fp8, trainers, speed, ranks, real",
            "skipped here: nothing",
        ),
    ],
)
def test_doctor_says_which_stages_can_run(
    cuda: bool, fused_layers: bool, sglang: bool, stages: str | None, left_out: str
) -> None:
    usable = {"CUDA": cuda, "transformers": True, "transformer-engine": fused_layers, "fp8": fused_layers}
    row = _gpu_tests(usable | {"sglang": sglang})
    assert (row.version, row.without) == (stages, left_out)
