"""`rollout.early_passes` in complete runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TinyModels
from tests.helpers.runs import difference, results, train, train_and_kill
from tests.helpers.train_tools import write_config
from tests.unit.trainers.test_early_passes import PPO


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of two runs: `whole` computes its passes in four parts, `at_once` in one."""
    folder = tmp_path_factory.mktemp("early")
    config = write_config(folder, tiny_models("llama"), **PPO)
    train(folder, config, "run.name=whole", "rollout.early_passes=4")
    train(folder, config, "run.name=at_once", "run.steps=2")
    return folder


def test_what_is_learnt_is_what_is_learnt_of_all_at_once(folder: Path) -> None:
    parts, at_once = results(folder / "runs/whole"), results(folder / "runs/at_once")
    for step, row in at_once.items():
        for name in ("actor/loss", "critic/loss", "actor/grad_norm", "critic/grad_norm", "kl/ref", "reward/mean"):
            assert parts[step][name] == pytest.approx(row[name], rel=2e-4, abs=2e-6), (step, name)


def test_passes_begin_before_the_last_sample_is_there(folder: Path) -> None:
    assert all(row["rollout/early_parts"] >= 1 for row in results(folder / "runs/whole").values())
    assert not any("rollout/early_parts" in row for row in results(folder / "runs/at_once").values())


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(folder: Path) -> None:
    """A run killed after step 2 resumes bit for bit."""
    config, killed = folder / "config.yaml", folder / "runs/killed"
    early = ("run.name=killed", "rollout.early_passes=4")
    train_and_kill(folder, killed, config, *early, "run.steps=50")
    train(folder, config, *early)
    assert set(difference(folder / "runs/whole", killed).values()) == {0.0}
