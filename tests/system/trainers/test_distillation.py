"""Complete runs with teachers: the student learns, and resuming after a kill reproduces the uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.config.schema import RolloutConfig
from mrl.inference.start import start_engine
from mrl.ports import free_port
from tests.conftest import TinyModels
from tests.helpers.runs import Runs, assert_the_same, results, train
from tests.helpers.train_tools import Train, write_config

pytestmark = pytest.mark.longest

SETTINGS: dict[str, Any] = {
    "actor": {"parallel": {"tensor": 2}, "optimizer": {"lr": 5e-3}, "max_tokens_per_microbatch": 200},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4, "epochs_per_step": 2,
              "shuffle_minibatches": True},
    "rollout": {"engine": "transformers"},
    "checkpoint": {"every_steps": 2, "export_hf": True},
}  # fmt: skip
QUICK: dict[str, Any] = {  # settings with which a student approaches its teacher in few steps
    "actor": {"optimizer": {"lr": 1e-2}},
    "batch": {"prompts_per_step": 16, "samples_per_prompt": 2, "samples_per_minibatch": 16},
    "rollout": {"engine": "transformers"},
}
STEPS = 8


def with_sources(folder: Path, config: Path) -> Path:
    """Moves half of the rows to another file, so that each teacher gets some."""
    tree = yaml.safe_load(config.read_text())
    rows = (folder / "train.jsonl").read_text().splitlines()
    for name, some in (("even", rows[::2]), ("odd", rows[1::2])):
        (folder / f"{name}.jsonl").write_text("\n".join(some) + "\n")
    tree["data"]["train"] = [{"path": str(folder / f"{name}.jsonl"), "name": name} for name in ("even", "odd")]
    config.write_text(yaml.safe_dump(tree))
    return config


@pytest.fixture(scope="module")
def runs(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs an actor with two teachers of other sizes and another family at TP2. The teachers are offloaded in the
    killed run only."""
    folder = tmp_path_factory.mktemp("distillation")
    teachers = {
        "even": {"path": str(tiny_models("llama", seed=4, hidden_size=96)), "offload": "all"},
        "odd": {"path": str(tiny_models("qwen2", tied=True, seed=5, vocab_size=384))},
    }
    teacher = {"teachers": teachers, "divergence": "jsd", "beta": 0.3, "coef": 2.0, "policy_coef": 0.5}
    config = write_config(folder, tiny_models("qwen2", tied=True), teacher=teacher, **SETTINGS)
    return Runs(folder, with_sources(folder, config), before=("actor.offload=all", "rollout.release=all"))


@pytest.fixture(scope="module")
def served_teacher(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Starts an engine with a nearly uniform teacher, and returns the keys of `teacher` that name it."""
    folder = tmp_path_factory.mktemp("served_teacher")
    path = str(tiny_models("llama", seed=4, hidden_size=96, initializer_range=0.01))
    with start_engine(RolloutConfig(engine="transformers"), path, "float32", folder) as engine:
        engine.wait_ready()
        key = folder / "key"
        key.write_text(str(engine.pool.access.api_key))
        key.chmod(0o600)
        yield {"path": path, "url": engine.urls[0], "api_key_file": str(key)}


def test_a_killed_and_resumed_run_is_the_same(runs: Runs) -> None:
    rows = results(runs.whole)
    assert all({"distill/kl", "distill/even", "distill/odd"} <= row.keys() for step, row in rows.items() if step)
    assert all(row["distill/kl"] > 0 and row["actor/pg_loss"] is not None for step, row in rows.items() if step)
    assert_the_same(runs)


@pytest.mark.parametrize("divergence", [pytest.param("reverse_kl", marks=pytest.mark.slow), "sampled"])
def test_a_student_approaches_its_teacher(tiny_models: TinyModels, tmp_path: Path, divergence: str) -> None:
    """A student approaches its teacher by distillation alone, without weight on the reward. The nearly uniform teacher
    is learned quickly."""
    path = str(tiny_models("llama", seed=4, hidden_size=96, initializer_range=0.01))
    teacher = {"path": path, "divergence": divergence, "policy_coef": 0.0}
    config = write_config(tmp_path, tiny_models("qwen2", tied=True), teacher=teacher, **QUICK)
    train(tmp_path, config, f"run.steps={STEPS}")
    kl = [row["distill/kl"] for step, row in sorted(results(tmp_path / "runs/run").items()) if step]
    assert len(kl) == STEPS
    assert sum(kl[-3:]) < 0.6 * sum(kl[:3]), kl


@pytest.mark.parametrize("divergence", ["forward_kl", pytest.param("sampled", marks=pytest.mark.slow)])
def test_a_student_approaches_a_teacher_behind_an_engine(
    served_teacher: dict[str, str], tiny_models: TinyModels, tmp_path: Path, divergence: str
) -> None:
    teacher = {**served_teacher, "divergence": divergence, "policy_coef": 0.0}
    config = write_config(tmp_path, tiny_models("qwen2", tied=True), teacher=teacher, **QUICK)
    train(tmp_path, config, f"run.steps={STEPS}")
    kl = [row["distill/kl"] for step, row in sorted(results(tmp_path / "runs/run").items()) if step]
    assert len(kl) == STEPS and all(value > -1 for value in kl)
    assert sum(kl[-3:]) < 0.6 * sum(kl[:3]), kl


def test_a_teacher_that_does_not_answer_ends_the_run_with_its_address(
    served_teacher: dict[str, str], tiny_models: TinyModels, tmp_path: Path
) -> None:
    teacher = {**served_teacher, "url": f"http://127.0.0.1:{free_port()}", "timeout_s": 2.0}
    config = write_config(tmp_path, tiny_models("qwen2", tied=True), teacher=teacher, **SETTINGS)
    with Train(tmp_path, config) as run:
        assert run.wait(120) != 0
    assert teacher["url"].removeprefix("http://127.0.0.1:") in run.terminal and "Traceback" not in run.terminal


def test_a_row_without_a_teacher_ends_the_run_before_it_starts(tiny_models: TinyModels, tmp_path: Path) -> None:
    teacher = {"teachers": {"even": {"path": str(tiny_models("qwen2", tied=True, seed=5))}}}
    config = write_config(tmp_path, tiny_models("qwen2", tied=True), teacher=teacher, **SETTINGS)
    with Train(tmp_path, with_sources(tmp_path, config)) as run:
        assert run.wait(120) != 0
    assert "has no teacher in teacher.teachers" in run.terminal and "Traceback" not in run.terminal
    assert "waiting for the engine" not in run.terminal
