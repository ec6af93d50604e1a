"""The GPU environment, as far as it can be checked without creating it: versions that fit, and their order."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]


def extras() -> dict[str, list[str]]:
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXTRAS":
            return ast.literal_eval(node.value)
    raise AssertionError("setup.py has no EXTRAS")


def test_transformer_engine_is_one_that_megatron_takes() -> None:
    named = [r for r in map(Requirement, extras()["gpu"]) if r.name == "transformer-engine"]
    (ours,) = (r for r in named if r.marker is None or r.marker.evaluate())
    wanted = [Requirement(text) for text in metadata.requires("megatron-core") or []]
    (theirs,) = (r for r in wanted if r.name == "transformer-engine" and r.marker and 'extra == "dev"' in str(r.marker))
    assert ours.extras == {"core_cu13", "pytorch"} == theirs.extras, "the kernels of torch's CUDA, and its extension"
    assert all(version in ours.specifier and version in theirs.specifier for version in ("2.9.0", "2.11.0"))
    assert not any(version in ours.specifier or version in theirs.specifier for version in ("2.8.0", "2.12.0"))


def test_torch_is_there_before_what_is_compiled_against_it() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "gpu-env", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if "install" in line]
    assert [next((e for e in ("sglang", "ninja", "[gpu]") if e in step), None) for step in steps] == [
        "sglang",
        "ninja",
        "[gpu]",
    ]
    assert "--no-build-isolation" in steps[-1] and not any("--no-build-isolation" in step for step in steps[:-1])
