"""Which fused parts can be used: told from packages that only look like them, once, with the reason."""

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
from tests import fake_te
from tests.test_platform import run_python

# with CUDA imitated after `install`, which is about this machine, and would hide what is for GPUs
WHERE = {"MRL_PLATFORM_OFF": "te_without_gpu"}
ASK = """
from mrl import platform; platform.install()
import torch; torch.cuda.is_available = lambda: True
print(platform.transformer_engine_usable(), platform.transformer_engine_problem())
import megatron.core.extensions.transformer_engine as te, megatron.core.transformer.mlp as mlp
print(te.HAVE_TE, mlp.HAVE_TE)
print({feature.part: feature.problem for feature in platform.features()}["transformer-engine"])
"""


def test_a_whole_package_is_usable(tmp_path: Path) -> None:
    done = run_python(ASK, path=fake_te.make(tmp_path), **WHERE)
    assert done.stdout.splitlines() == ["True None", "True True", "None"], done.stderr


@pytest.mark.parametrize("name", fake_te.BROKEN)
def test_a_broken_package_is_not_usable_and_megatron_does_not_believe_in_it(name: str, tmp_path: Path) -> None:
    source, says = fake_te.BROKEN[name]
    done = run_python(ASK, path=fake_te.make(tmp_path, source), **WHERE)
    assert done.stdout.splitlines() == [f"False {says}", "False False", says], done.stderr


def test_an_apex_without_its_kernel_is_not_usable(tmp_path: Path) -> None:
    """PyPI's package of this name is another program; a build without CUDA has no kernels."""
    (tmp_path / "apex.py").write_text("")
    code = (
        "import torch; torch.cuda.is_available = lambda: True\nfrom mrl import platform; print(platform.apex_usable())"
    )
    assert run_python(code, path=tmp_path).stdout.split() == ["False"]
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").write_text("")
    assert run_python(code, path=tmp_path).stdout.split() == ["True"]


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is told of it is forgotten before and after."""
    platform.install()  # this machine's
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fused.transformer_engine_problem.cache_clear()
    yield
    fused.transformer_engine_problem.cache_clear()


def test_a_machine_is_asked_once(with_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python does not remember that a package is absent, and every micro-batch asks."""
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
            "cuda, engine, trainers, speed",
            "skipped here: transformer_engine, fp8, engine's checks of SGLang",
        ),
        (True, True, True, "cuda, engine, transformer_engine, fp8, trainers, speed", "skipped here: nothing"),
    ],
)
def test_doctor_says_which_stages_can_run(
    cuda: bool, fused_layers: bool, sglang: bool, stages: str | None, left_out: str
) -> None:
    usable = {"CUDA": cuda, "transformers": True, "transformer-engine": fused_layers, "fp8": fused_layers}
    row = _gpu_tests(usable | {"sglang": sglang})
    assert (row.version, row.without) == (stages, left_out)
