"""A run on problems of a reasoning-gym task, selected by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config import reasoning_tasks
from tests.conftest import TinyModels
from tests.helpers.runs import samples, train
from tests.helpers.train_tools import write_config

pytest.importorskip("reasoning_gym", reason="the package reasoning-gym (extra tasks) is not installed")
NAME = "reasoning_gym:letter_counting?size=8&seed=3&max_words=2&min_words=1"


def test_a_run_is_scored_by_the_library(tiny_models: TinyModels, tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        tiny_models("llama"),
        data={"train": NAME, "validation": NAME.replace("seed=3", "seed=11"), "max_prompt_tokens": 256},
        rollout={"engine": "transformers", "sampling": {"max_new_tokens": 4}},
        reward={"function": "reasoning_gym"},
    )
    train(tmp_path, config)
    found = samples(tmp_path / "runs/run")
    rows = reasoning_tasks.rows(NAME)
    assert len(found["step_1.jsonl"]) == 8 and len(found["validation_step_1.jsonl"]) == 8
    for sample in found["step_1.jsonl"]:
        row = rows[sample["index"]]
        assert sample["prompt"] == row["prompt"]
        assert sample["score"] == reasoning_tasks.score(sample["response"].strip(), row)
