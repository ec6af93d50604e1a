"""Environments of the verifiers package by name: their turns are recorded, and the scores are the package's own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import BadRequestError
from openai.types.chat import ChatCompletion

from mrl.agents.runner import AgentRunner
from mrl.agents.verifiers_program import load_environment_program
from mrl.config import verifiers_environments
from mrl.config.schema import AgentConfig, SourceConfig
from mrl.core import Prompt, Request, Sample
from mrl.data.errors import DataError
from mrl.data.sources import open_rows
from mrl.user_functions import FunctionError
from tests.conftest import TinyModels
from tests.helpers.runs import results, samples
from tests.helpers.train_tools import write_config
from tests.helpers.trajectories import play_all
from tests.system.agents.test_agent_endpoint import END, ENDS, Model, parts
from tests.system.agents.test_agents import PARAMS, ids_of

pytest.importorskip("verifiers", reason="the package verifiers (extra verifiers) is not installed")
pytestmark = pytest.mark.long

HERE = Path(__file__).parents[2] / "helpers/verifiers_environments"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class Said:
    """A client of the verifiers package that returns these answers in turn, and then the error of a full context."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))
        self._answers = iter(answers)

    async def _create(self, **_: Any) -> ChatCompletion:
        message = next(self._answers, None)
        if message is None:
            full = httpx.Response(
                400, text="this model's maximum context length is 9", request=httpx.Request("POST", "/")
            )
            raise BadRequestError("full", response=full, body=None)
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return ChatCompletion.model_validate(answer)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the environments importable, as if installed. An environment must not set signal handlers here."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setattr("signal.signal", lambda *_: None)


def rows_of(name: str, split: str | None = None) -> list[dict[str, Any]]:
    rows = open_rows(SourceConfig(path=name, split=split))
    return [rows[i] for i in range(len(rows))]


def play(name: str, rows: list[dict[str, Any]], model: Model, **settings: Any) -> list[Sample]:
    cfg = AgentConfig(rollout=name, endpoint=True, workers=1, step_timeout_s=60.0, **settings)
    agents = AgentRunner(cfg, model.tokenizer, ids_of(model.tokenizer, END), is_chat=True)
    try:
        asked = [Request(i, 0, Prompt(i, (1, 2), row, "-"), 100 + 7 * i) for i, row in enumerate(rows)]
        return play_all(agents, asked, PARAMS, model.generate)
    finally:
        agents.close()


def library_scores(name: str, rows: list[dict[str, Any]], samples: list[Sample]) -> list[dict[str, float]]:
    """Returns the package's own scores of the same answers."""

    def as_sent(message: dict[str, Any]) -> dict[str, Any]:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        return {**message, "content": message["content"] or None, **({"tool_calls": calls} if calls else {})}

    environment = verifiers_environments.load(name)

    async def score(row: dict[str, Any], sample: Sample) -> dict[str, float]:
        client = Said([as_sent(m) for m in sample.messages if m["role"] == "assistant"])
        output = await environment.run_rollout(row, client, "m", {})
        return {"score": output["reward"], **output["metrics"]}

    return [asyncio.run(score(row, sample)) for row, sample in zip(rows, samples, strict=True)]


def scored_as_by_the_library(name: str, rows: list[dict[str, Any]], samples: list[Sample]) -> list[float]:
    expected = library_scores(name, rows, samples)
    assert [sample.environment for sample in samples] == expected
    return [each["score"] for each in expected]


def test_single_turns() -> None:
    """Single-turn samples get the package's scores. The last row's answer is empty, which is the model's fault."""
    name, model = "verifiers:last-digits?first=25", Model()
    rows, generate = rows_of(name), model.generate

    def answer(requests: list[Request], params: object) -> list[Sample]:
        [sample] = generate(requests, params)
        if sample.request.sample_id == len(rows) - 1:
            sample.response_ids, sample.log_probs = sample.response_ids[-1:], sample.log_probs[-1:]
        return [sample]

    model.generate = answer  # type: ignore[method-assign]
    assert [row["prompt"][-1]["content"] for row in rows] == [f"last digit of {n}?" for n in range(25, 31)]
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Answer with one digit."}
    samples = play(name, rows, model, retries=0)
    scores = scored_as_by_the_library(name, rows, samples)
    assert len(set(scores)) > 2 and {"is_right", "length", "num_turns"} <= samples[0].environment.keys()
    assert scores[-1] == 0.0 and samples[-1].num_generated_tokens == 1
    for sample, row in zip(samples[:-1], rows[:-1], strict=True):
        [(ids, drawn)] = parts(sample)
        assert sum(drawn) == 3 and sample.messages[:-1] == row["prompt"]
        assert ids == model.tokenizer.encode_plain([model.tokenizer.render_prompt(sample.messages)])[0][: len(ids)]


def test_several_turns_are_one_sequence_until_the_run_s_limit() -> None:
    name, model = "verifiers:higher_lower?max_turns=4", Model()
    rows = [dict(row) for row in verifiers_environments.load(name).get_dataset()]
    samples = play(name, rows, model, max_turns=3)
    assert len(set(scored_as_by_the_library(name, rows, samples))) > 1
    for sample in samples:
        [(ids, drawn)] = parts(sample)
        assert [m["role"] for m in sample.messages] == ["user", "assistant"] * 3 and sum(drawn) == 3 * 3
        assert sample.environment["num_turns"] == 3 and sample.environment["answers"] == 3
        for request in (each for each in model.asked if each.sample_id == sample.request.sample_id):
            assert ids[: len(request.prompt.token_ids)] == list(request.prompt.token_ids), "tokenised again"


def test_tools() -> None:
    name, model = "verifiers:adding_tool", Model(says=CALL)
    rows = [dict(row) for row in verifiers_environments.load(name).get_dataset()]
    samples = play(name, rows, model, parser="hermes")
    assert scored_as_by_the_library(name, rows, samples) == [1.2, 0.2]
    for sample in samples:
        assert [m["role"] for m in sample.messages] == ["user", "assistant", "tool", "assistant"]
        assert sample.messages[2]["content"] == "3" and not sample.sequence_lens


def test_an_environment_that_ships_with_the_package() -> None:
    gym = pytest.importorskip("reasoning_gym", reason="the package reasoning-gym (extra tasks) is not installed")
    name, answer = "verifiers:problems_of_a_gym", gym.create_dataset("chain_sum", size=6, seed=3)[4]["answer"]
    rows = rows_of(name, "eval")
    assert [row["answer"] for row in rows] == ["4", "5"], "the library's numbers of problems"
    samples = play(name, rows, Model(says=f"<answer>\n{answer}\n</answer>"))
    scores = scored_as_by_the_library(name, rows, samples)
    assert scores[0] == 1.0 and scores[1] < 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("verifiers:nowhere", "there is no module nowhere: install the package"),
        ("verifiers:last_digits?sise=3", "load_environment failed: TypeError"),
        ("verifiers:compared_answers", "its reward is_longest compares the answers of a group"),
        ("verifiers:adding_tool", "it has tools: set agent.parser"),
        ("verifiers:no name", "is not the name of an environment"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_first_turn(name: str, said: str) -> None:
    with pytest.raises(FunctionError, match=said):
        load_environment_program(name, None)


def test_what_has_no_rows_is_said() -> None:
    with pytest.raises(DataError, match="the environment has no eval data: validate on other rows"):
        rows_of("verifiers:last_digits?with_eval=false", "eval")


def test_a_run_trains_and_validates_on_an_environment_by_its_name(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    (tmp_path / "template.jinja").write_text(ENDS)
    config = write_config(
        tmp_path,
        tiny_models("llama"),
        run={"steps": 1},
        data={
            **{"train": "verifiers:last_digits", "validation": [{"path": "verifiers:last_digits", "split": "eval"}]},
            **{"max_prompt_tokens": 128, "chat_template": True},
        },
        rollout={"engine": "transformers", "sampling": {"max_new_tokens": 4}},
        agent={"rollout": "verifiers:last_digits", "endpoint": True, "max_tokens": 200, "step_timeout_s": 60},
        reward={"function": "environment"},
        batch={"prompts_per_step": 2, "samples_per_prompt": 2},
        algorithm={"adv_estimator": "grpo"},
        validation={"every_steps": 1, "prompts": 2},
    )
    command = [sys.executable, "-m", "mrl", "train", str(config), f"model.chat_template={tmp_path / 'template.jinja'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)  # a fork would not read PYTHONPATH
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    row = results(tmp_path / "runs/run")[1]
    of_step = samples(tmp_path / "runs/run")["step_1.jsonl"]
    assert len(of_step) == 4 and all(each["messages"][0]["content"] == "Answer with one digit." for each in of_step)
    assert {"validation/length", "validation/is_right", "validation/num_turns"} <= row.keys(), "of the rubric"
    each = [(sample["score"], sample["messages"][-1]["content"]) for sample in of_step]
    assert row["reward/mean"] == pytest.approx(sum(score for score, _ in each) / 4) and len({*each}) > 1
