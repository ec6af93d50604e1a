"""Problems of reasoning-gym tasks as rows: rows and scores are the library's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.config import reasoning_tasks, resume
from mrl.config.checks.data import read_columns
from mrl.config.loader import load
from mrl.config.problems import ConfigError
from mrl.config.schema import SourceConfig
from mrl.data import DataError
from mrl.data.sources import open_rows
from mrl.reward.loading import answer_problem
from mrl.reward.loading import load as load_reward
from mrl.reward.score_requests import ScoreRequest
from tests.conftest import TinyModels

gym = pytest.importorskip("reasoning_gym", reason="the package reasoning-gym (extra tasks) is not installed")
NAME = "reasoning_gym:chain_sum?size=20&seed=7&max_terms=3"
EVALUATED = ("binary_matrix", "countdown", "n_queens", "puzzle24", "spiral_matrix", "string_insertion")


def scored(response: str, row: dict[str, Any]) -> float:
    score: Callable[[ScoreRequest], Any] = load_reward("reasoning_gym")
    found = score(ScoreRequest("", response, row, 1))
    assert isinstance(found, float)
    return found


@pytest.mark.parametrize(
    "task", ["chain_sum", "letter_jumble", "maze", "knights_knaves", "sudoku", "family_relationships"]
)
def test_rows_and_scores_are_the_librarys(task: str) -> None:
    name = f"reasoning_gym:{task}?size=6&seed=3"
    rows, library = open_rows(SourceConfig(path=name)), gym.create_dataset(task, size=6, seed=3)
    assert len(rows) == 6
    for i, problem in enumerate(library):
        row = json.loads(json.dumps(rows[i]))  # as a worker receives it
        assert (row["prompt"], row["answer"], row["data_source"]) == (problem["question"], problem["answer"], task)
        for answer in (problem["answer"], problem["answer"][:-1], "0", "", f"x {problem['answer']}"):
            want = library.score_answer(answer.strip(), problem)
            assert scored(f"<think>7</think><answer>{answer}</answer>", row) == want or not answer
            assert scored(f"<think>7</think>{answer}", row) == want
    assert len({rows[i]["prompt"] for i in range(6)}) > 1


def test_rows_depend_on_seed_and_settings_alone() -> None:
    rows = [reasoning_tasks.rows.__wrapped__(NAME) for _ in range(2)]
    assert rows[0] == rows[1]
    other = reasoning_tasks.rows("reasoning_gym:chain_sum?size=20&seed=8&max_terms=3")
    assert [row["prompt"] for row in other] != [row["prompt"] for row in rows[0]]
    contents = [resume.contents(Path(name)) for name in (NAME, NAME, NAME.replace("seed=7", "seed=8"))]
    assert contents[0] == contents[1] != contents[2]
    assert read_columns(SourceConfig(path=NAME)) == {name: type(value) for name, value in rows[0][0].items()}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chain_sum", "size must be 1 to 1000000: write reasoning_gym:chain_sum.size=1000&seed=1"),
        ("chain_sum?size=0", "size must be"),
        ("chain_sum?size=9&seed=x", "seed is 'x'"),
        ("chain_sum?size=9&size=8", "a setting occurs twice"),
        ("chain_sums?size=9", "no task 'chain_sums'; close: .*chain_sum"),
        ("chain_sum?size=9&terms=3", "refuses these settings: TypeError: .*terms"),
        ("chain_sum?size=9&min_terms=-1", "refuses these settings: AssertionError"),
        ("word_ladder?size=9", "draws other problems of word_ladder in each process"),
        *((f"{task}?size=9", f"the scorer of {task} runs responses as Python code") for task in EVALUATED),
    ],
)
def test_names_that_are_none(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_rows(SourceConfig(path=f"reasoning_gym:{name}"))
    with pytest.raises(ValueError, match=message):
        read_columns(SourceConfig(path=f"reasoning_gym:{name}"))


def test_rows_of_other_data_have_no_score() -> None:
    for row in ({"answer": "1"}, {"reasoning_gym": "chain_sum"}, {"reasoning_gym": {"source": "a.jsonl", "index": 0}}):
        assert "is not of a source reasoning_gym:TASK" in (answer_problem("reasoning_gym", row, "answer") or "")
        with pytest.raises(ValueError, match="is not of a source"):
            scored("1", row)
    row = reasoning_tasks.rows(NAME)[0]
    with pytest.raises(ValueError, match="is another one in each process"):
        scored("1", {"reasoning_gym": {**row["reasoning_gym"], "index": 1}})
    assert answer_problem("reasoning_gym", reasoning_tasks.rows(NAME)[0], "answer") is None


def test_a_configuration_names_tasks(tiny_models: TinyModels, tmp_path: Path) -> None:
    def problems(train: str, validation: str) -> str:
        config = {
            **{"trainer": "rl", "run": {"name": "run", "root": str(tmp_path), "steps": 1}},
            **{
                "model": {"path": str(tiny_models("llama")), "dtype": "float32"},
                "algorithm": {"adv_estimator": "grpo"},
            },
            "data": {"train": train, "validation": validation, "max_prompt_tokens": 256, "chat_template": False},
            **{"batch": {"prompts_per_step": 2, "samples_per_prompt": 2}, "reward": {"function": "reasoning_gym"}},
            "rollout": {"sampling": {"max_new_tokens": 64}},
        }
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
        try:
            load(tmp_path / "c.yaml")
        except ConfigError as error:
            return str(error)
        return ""

    later = NAME.replace("seed=7", "seed=27")
    assert problems(NAME, later) == ""
    assert problems(NAME, NAME.replace("max_terms=3", "max_terms=4")) == ""
    assert "shares problems with" in problems(NAME, NAME.replace("seed=7", "seed=26"))
    assert "has no task 'chain'" in problems("reasoning_gym:chain?size=9", later)
