"""A new tracker needs one file, one line in the table, and one key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config.schema import SFTConfig
from mrl.observe import trackers
from tests.helpers.recipe import Recipe

CODE = """
import sys
from pathlib import Path
from mrl.config.schema import SFTConfig
from mrl.core import StepStats
from mrl.observe import Recorder, trackers

cfg = SFTConfig(
    trainer="sft", run={"name": "one", "trackers": ("csv",)}, model={"path": "m"}, data={"train": "t.jsonl"},
    batch={"samples_per_step": 4},
)
run_dir = Path(sys.argv[1])
with Recorder(run_dir, 2, trackers.make(cfg, run_dir), live=False) as recorder:
    for step in (1, 2):
        recorder.log(StepStats(step, {"reward/mean": step / 4}))
"""


def test_the_recipe_is_one_file_and_two_lines(tmp_path: Path) -> None:
    recipe = Recipe("A tracker", tmp_path)
    assert (len(recipe.new), len(recipe.changed)) == (1, 2)


@pytest.mark.slow
def test_the_recipe(tmp_path: Path) -> None:
    recipe = Recipe("A tracker", tmp_path)
    recipe.run(CODE, tmp_path)
    assert (tmp_path / "metrics.csv").read_text() == "1,reward/mean,0.25\n2,reward/mean,0.5\n"


@pytest.fixture
def sft(tmp_path: Path) -> SFTConfig:
    return SFTConfig.model_validate(
        {
            "trainer": "sft",
            "run": {"name": "one", "root": str(tmp_path / "runs"), "steps": 3},
            "model": {"path": "models/tiny"},
            "data": {"train": "train.jsonl"},
            "batch": {"samples_per_step": 4},
        }
    )


def test_a_package_that_is_missing_is_said_before_anything_starts(
    sft: SFTConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    monkeypatch.setattr("mrl.config.loader.load", lambda *args, **more: sft)
    monkeypatch.setattr("mrl.preflight.checks.RUN_CHECKS", ())
    assert main(["train", "config.yaml"]) == 1
    assert re.fullmatch(
        r"run.trackers: tensorboard needs the package tensorboard, which is not installed: .*python -m pip install .*, "
        r"or [^\n]*tensorboard[^\n]*\n",
        capfd.readouterr().err,
    )
    assert not (tmp_path / "runs").exists()
