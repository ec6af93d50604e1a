"""A row's columns mean the same to every trainer: system message, tools, template variables, images and weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl import cli
from mrl.agents.trajectory import TokenSequence, Trajectory
from mrl.config.schema import DataConfig, PreferenceDataConfig, RewardDataConfig, RLConfig, SFTDataConfig
from mrl.core import Prompt, Request, Sample
from mrl.data import (
    DataError,
    PreferenceDataset,
    PromptDataset,
    SFTDataset,
    data_notes,
    preference_notes,
    sft_notes,
)
from mrl.trainers.rl import main_parts
from tests.conftest import TinyModels
from tests.unit.data.test_sft_data import CHATML, with_template

TELLS = "{% if tools %}[{{ tools[0]['name'] }}]{% endif %}{% if mood %}({{ mood }}){% endif %}" + CHATML
ROW = {
    "prompt": "1+1?",
    "answer": "2",
    "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
    "chosen": "2",
    "rejected": "3",
    "completion": "2",
    "label": True,
    "score": 0.5,
    "system": "be brief",
    "info": {"tools": [{"name": "add"}]},
    "chat_template_kwargs": {"mood": "calm"},
}


@pytest.mark.parametrize(
    "use", ["rl", "ptx", "sft answers", "sft messages", "sft turns", "pairs", "labels", "scores", "steps"]
)
def test_the_same_row_gives_every_trainer_the_same_prompt(tmp_path: Path, use: str) -> None:
    tokenizer = with_template(tmp_path / "tokenizer", TELLS)
    row: dict[str, Any] = dict(ROW)
    if use == "sft turns":
        row["answer"] = row["messages"][1:]
    if use in ("labels", "scores"):
        del row["chosen"]
    if use == "steps":
        row |= {"completions": ["2"], "labels": [True]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    keys = {"train": str(tmp_path / "rows.jsonl"), "chat_template": True, "tools_key": "info.tools"}
    sources = DataConfig.model_validate(keys).train
    if use in ("rl", "ptx"):
        prompts = PromptDataset(sources, DataConfig.model_validate(keys), tokenizer, require_answer=use == "ptx")
        [found] = prompts.first(1)
        ids = list(found.token_ids)
        assert found.text == tokenizer.decode(ids, special=True)
    elif use.startswith("sft"):
        form = "messages" if use == "sft messages" else "answers"
        [example] = SFTDataset(sources, SFTDataConfig.model_validate(keys | {"form": form}), tokenizer).rows
        ids = example.ids[: example.prompt].tolist()
    else:
        cls = PreferenceDataConfig if use in ("pairs", "labels") else RewardDataConfig
        [compared] = PreferenceDataset(sources, cls.model_validate(keys), tokenizer, use).rows  # type: ignore[arg-type]
        ids = compared.prompt.tolist()
    want = (
        "[add](calm)<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids, special=True) == want


def test_columns_that_are_something_else_are_refused_with_the_way_out(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path / "tokenizer", TELLS)

    def read(row: dict[str, Any], **keys: Any) -> PromptDataset:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "hi"} | row) + "\n")
        cfg = DataConfig.model_validate({"train": str(tmp_path / "rows.jsonl"), "chat_template": True} | keys)
        return PromptDataset(cfg.train, cfg, tokenizer)

    with pytest.raises(DataError, match=r"rows.jsonl:1: 'tools' must be a list of objects.* data.tools_key .*null"):
        read({"tools": ["add", "subtract"]})
    assert len(read({"tools": ["add", "subtract"]}, tools_key=None)) == 1
    with pytest.raises(DataError, match=r"'system' is a system message, and .* data.system_key .*null"):
        read({"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "system": "c"})


IDLE = {
    "rl": ["'chat_template_kwargs'", "'images'", "'prompt[].weight'", "'system'", "'tools'", "'weight'"],
    "sft": ["'chat_template_kwargs'", "'images'", "'system'", "'tools'", "'weight'"],
    "pairs": ["'chat_template_kwargs'", "'images'", "'margin'", "'system'", "'tools'", "'weight'"],
}


@pytest.mark.parametrize("use", IDLE)
def test_a_column_without_effect_is_named_once(tmp_path: Path, use: str) -> None:
    tokenizer = with_template(tmp_path / "tokenizer", CHATML)
    row = ROW | {"tools": [{"name": "add"}], "weight": 2.0, "images": ["a.png"], "margin": 1.0}
    chat = use == "rl"  # with a template, since only messages have weights
    row |= {"prompt": [{"role": "user", "content": "hi", "weight": 0}]} if chat else {}
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps(row) + "\n"))
    keys = {"train": str(tmp_path / "rows.jsonl"), "chat_template": chat}
    sources = DataConfig.model_validate(keys).train
    if use == "rl":
        prompts = PromptDataset(sources, DataConfig.model_validate(keys), tokenizer)
        notes = data_notes(tokenizer, {"data.train": prompts})
    elif use == "sft":
        notes = [*sft_notes("data.train", SFTDataset(sources, SFTDataConfig.model_validate(keys), tokenizer))]
    else:
        cfg = PreferenceDataConfig.model_validate(keys)
        notes = [*preference_notes("data.train", PreferenceDataset(sources, cfg, tokenizer, "pairs"))]
    said = [note for note in notes if "which has no effect" in note]
    wanted = [name for name in IDLE[use] if not (chat and name in ("'chat_template_kwargs'", "'system'", "'tools'"))]
    assert [note.split(",")[0] for note in said] == [f"data.train: 2 rows have {name}" for name in wanted]
    if not chat:
        assert any("'tools', which has no effect: data.chat_template is false" in note for note in said)


@pytest.mark.parametrize("command", ["data", "preflight"])
def test_commands_name_a_column_without_effect(
    tmp_path: Path,
    tiny_models: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1", "tools": [{"name": "add"}]}\n')
    (tmp_path / "c.yaml").write_text(
        f"trainer: sft\nrun: {{name: run, steps: 1, root: {tmp_path}}}\nmodel: {{path: {tiny_models('llama')}}}\n"
        "data: {train: rows.jsonl, max_prompt_tokens: 99}\nbatch: {samples_per_step: 1}\n"
    )
    cli.main([command, "c.yaml"])
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert said.count("1 rows have 'tools', which has no effect: data.chat_template is false") == 1


def test_later_turns_of_an_agent_are_told_what_its_row_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template(
        tmp_path / "tokenizer", CHATML.removesuffix("{% endif %}") + "{% if mood %}({{ mood }}){% endif %}{% endif %}"
    )
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    cfg = RLConfig.model_validate({
        "trainer": "rl", "run": {"name": "r"}, "model": {"path": "-"}, "data": {"train": "-", "chat_template": True},
        "algorithm": {"adv_estimator": "grpo"}, "reward": {"function": "environment"},
        "batch": {"prompts_per_step": 1}, "agent": {"rollout": "a.py:A", "max_tokens": 2048},
        "rollout": {"sampling": {"stop_token_ids": (end,)}},
    })  # fmt: skip
    monkeypatch.setattr("mrl.agents.runner.WorkerPool", lambda *parts, **more: None)
    assert cfg.agent is not None
    agents = main_parts.make_agents(cfg, cfg.agent, tokenizer)
    row = {"prompt": "1+1?", "system": "be brief", "chat_template_kwargs": {"mood": "calm"}}
    prompt, words = Prompt(0, (1,), row), [{"role": "user", "content": "2+2?"}]
    first = tokenizer.decode(agents._first(prompt, words), special=True)
    assert first.startswith("<|im_start|>system\nbe brief<|im_end|>") and first.endswith("assistant\n(calm)")
    request = Request(0, 0, prompt, 1)
    line = TokenSequence((1,), [end], [True])
    trajectory = Trajectory(
        request, sequences=[line], turns=[Sample(request, np.array([end]), np.zeros(1), "stop", "0")]
    )
    assert agents._heard(trajectory, words) is None and trajectory.next is not None
    assert tokenizer.decode([*trajectory.next.said], special=True).endswith("assistant\n(calm)")
