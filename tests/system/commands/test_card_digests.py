"""The digests in a model card equal those of sha256sum."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mrl.weights.disk.digest import file_digests, weight_files, whole_digest
from tests.conftest import TinyModels
from tests.unit.cards.test_cards import ROWS, a_card


@pytest.fixture
def base(tiny_models: TinyModels, tmp_path: Path) -> Path:
    """Copies a model's directory, with a card, to the layout of the hub's cache."""
    snapshot = tmp_path / "secret_home" / "models--Org--Tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(tiny_models("llama"), snapshot)
    (snapshot / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\n# Tiny\n")
    return snapshot


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run_dir = tmp_path / "secret_home" / "my run | ---"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return run_dir


def test_the_digests_are_what_sha256sum_prints(base: Path, run_dir: Path, tmp_path: Path) -> None:
    text = a_card(base, run_dir, tmp_path / "hf")
    printed = subprocess.run(["sha256sum", *weight_files(base)], capture_output=True, text=True, check=True).stdout
    assert f"| SHA-256 of the base | `{printed.split()[0]}` |" in text
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_text(name)
    several = "sha256sum *.safetensors | sha256sum"
    printed = subprocess.run(several, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert whole_digest(file_digests(weight_files(tmp_path))) == printed.split()[0]
