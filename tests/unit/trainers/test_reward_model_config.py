"""`trainer: reward_model`: refusals, and the output of `mrl data`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mrl import cli
from mrl.config.loader import ConfigError, load
from mrl.scoring.accuracy import SECTIONS, ScoredRow, report
from tests.helpers.reward_model_config import write
from tests.system.trainers.test_resume import TinyModels
from tests.system.trainers.test_reward_trainer import blocks


def test_the_reward_model_of_the_page_can_be_trained(tiny_models: TinyModels, tmp_path: Path) -> None:
    write(tmp_path, tiny_models("llama"))
    (tmp_path / "rm.yaml").write_text(blocks()[0])
    data = {"train": str(tmp_path / "pairs.jsonl"), "validation": str(tmp_path / "pairs.jsonl"), "max_tokens": 32}
    small = [f"data={json.dumps(data | {'max_prompt_tokens': 16})}", "batch.rows_per_step=6", "run.nproc=2"]
    cfg = load(tmp_path / "rm.yaml", [f"model.path={tiny_models('llama')}", *small])
    assert cfg.data_uses()["data"].preferences == "pairs" and cfg.checkpoint.export_hf


def test_sections_of_rewardbench_are_weighted_as_it_does() -> None:
    right, wrong = (ScoredRow((a, b), (1, 1), (1.0, 0.0), "") for a, b in ((1.0, 0.0), (0.0, 1.0)))
    names = [name for counts in SECTIONS.values() for name in counts]
    judged = [replace(right if name != "math-prm" else wrong, subset=name) for name in names]
    found = report(judged)
    assert found.sections == {"Chat": 1.0, "Chat Hard": 1.0, "Safety": 1.0, "Reasoning": pytest.approx(0.5)}
    assert found.final == pytest.approx(0.875) and report(judged[1:]).final is None
    assert not ScoredRow((1.0, 1.0), (1, 1), (1.0, 0.0), None).is_right


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--at-least", "2"), "an accuracy between 0 and 1"),
        (("--max-tokens", "1"), "--max-tokens at least 2"),
        ((), "does not score texts: expected a ...ForSequenceClassification"),
    ],
)
def test_what_mrl_eval_reward_cannot_be_asked(
    arguments: tuple[str, ...], said: str, tiny_models: TinyModels, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", "reward", str(tiny_models("llama")), "rows.jsonl", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("reward_model.loss=bradley", "did you mean bradley_terry?"),
        ("reward_model={loss: regression, label_smoothing: 0.1}", "has no effect: the loss is regression"),
        ("reward_model.label_smoothing=0.5", "must be less than 0.5"),
        ("reward_model.loss=regression", "has no 'completion'"),
        ("reward_model.loss=process", "has no 'completions'"),
        ("reward_model.heads=2", "heads that all start at zero stay equal"),
        ("reward_model={heads: 2, head_start: zero}", "heads that all start at zero stay equal"),
        ("reward_model.head_start=checkpoint", "has no score head: use zero or normal"),
        ("data.margin_key=lead", "data.margin_key: has no effect: no margin is used"),
        ("data.score_key=s", "data.score_key: has no effect: the loss is bradley_terry"),
        ("data.max_prompt_tokens=32", "leave no room for a response in 32 tokens"),
        ("data.max_tokens=4096", "exceeds the model's 512 positions"),
        ("data.rejected_key=worse", "has no 'worse'"),
        ("data.answer_key=other", "data.answer_key: has no effect"),
        ("data.ranked_pairs=all", "data.ranked_pairs: has no effect: the rows have no 'completions'"),
        ("data.validation=null", "validation.every_steps: has no effect: there are no held-out rows"),
        (
            "reward_model.loss=regression;validation.metric=rewards/margins",
            "validation.metric: rewards/margins is not a metric",
        ),
        ("run.nproc=8", "batch.rows_per_step: 6 rows are fewer than the 8 data-parallel replicas"),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(
    tiny_models: TinyModels, tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load(write(tmp_path, tiny_models("llama")), override.split(";"))


def test_mrl_data_shows_every_form(tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for form, loss in (("pairs", "bradley_terry"), ("scores", "regression"), ("steps", "process")):
        config = write(tmp_path, tiny_models("llama"), form, reward_model={"loss": loss})
        assert cli.main(["data", str(config), "--samples", "1", "data.shuffle=false"]) == 0
        shown[form] = capsys.readouterr().out
    assert "data.train: 12 pairs" in shown["pairs"] and "scores: 0 to 2, 1 on average" in shown["scores"]
    assert "steps: 12 good of 24" in shown["steps"] and "--> solution, steps good bad: 6 tokens" in shown["steps"]
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"prompt": "1", "completions": ["a", "b"], "labels": [true]}\n')
    assert cli.main(["data", str(config)]) == 1
    assert "steps.jsonl:13: 'labels' must be a list with a label for each of the 2 steps" in capsys.readouterr().err


def test_what_would_lose_its_end_is_left_out(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, tiny_models("llama"))
    assert cli.main(["data", str(config), "data.max_tokens=17"]) == 0
    assert re.search(r"data.train: \d+ pairs left out: a response does not fit into data.max_tokens=17",
                     capsys.readouterr().out)  # fmt: skip
