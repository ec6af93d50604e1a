"""`mrl preflight` runs the reward function in a separate process: the mistakes that this finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.config.loader import load
from mrl.preflight.checks import INPUT_CHECKS, run_checks
from mrl.preflight.finding import problems
from mrl.preflight.machine import check_services
from tests.conftest import TinyModels
from tests.helpers.bad_runs import MISTAKES_OF_FUNCTIONS, SCORE, Mistake, scores
from tests.helpers.preflight_run import assert_named, preflight_run
from tests.helpers.train_tools import write_config


@pytest.fixture
def run(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    return preflight_run(tiny_models("qwen2"), tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("mistake", MISTAKES_OF_FUNCTIONS, ids=lambda mistake: mistake.id)
def test_a_function_s_mistake_is_named(mistake: Mistake, run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    assert_named(mistake, *run(mistake))


def test_with_errors_that_score_zero_a_failing_function_is_a_warning(run: Callable[..., tuple[int, Any]]) -> None:
    code, said = run(Mistake("zero", (), (SCORE, "reward.on_error=zero"), scores("return 1 / 0")))
    assert code == 0 and [f["verdict"] for f in said["findings"] if f["check"] == "reward"] == ["warning"]


def test_each_adapter_is_checked_with_its_own_data_and_reward(tiny_models: TinyModels, tmp_path: Path) -> None:
    """The run's reward could not score the rows of the second one."""
    (tmp_path / "fails.py").write_text("def score(prompt, response, row):\n    raise KeyError('the judge is gone')\n")
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "words.jsonl").write_text('{"prompt": "say hello", "answer": "hello"}\n')
    words = {"train": str(tmp_path / "words.jsonl"), "max_prompt_tokens": 16}
    sections: dict[str, Any] = {"reward": {"function": "arithmetic"}, "sync": {"lora": "adapter"}}
    sections |= {"data": {"train": str(tmp_path / "sums.jsonl"), "max_prompt_tokens": 16}}
    sections |= {"actor": {"lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}}
    sections["adapters"] = {"sums": {}, "words": {"data": words, "reward": {"function": "exact_match"}}}
    config = write_config(tmp_path, tiny_models("llama"), **sections)
    assert not problems(list(run_checks(load(config, []), INPUT_CHECKS)))
    told = [f"adapters.words.reward={{function: '{tmp_path / 'fails.py'}:score'}}"]
    told.append("adapters.sums.reward={manager: remote, servers: {judge: {url: 'http://127.0.0.1:1'}}}")
    broken = load(config, told)
    [fails] = problems(list(run_checks(broken, INPUT_CHECKS)))
    assert fails.check == "reward" and "adapter words: " in fails.text and "the judge is gone" in fails.text
    [away] = problems(list(check_services(broken)))
    assert away.text.startswith("adapters.sums.reward.servers.judge.url: nothing answers at 127.0.0.1")
