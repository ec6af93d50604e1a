"""The tokens with which a model learns to end a turn: notes before a run, and the export's generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mrl import cli
from mrl.config.schema import PreferenceDataConfig, RewardDataConfig, SFTDataConfig
from mrl.data import DataError, PreferenceDataset, SFTDataset, Tokenizer, load_tokenizer, preference_notes, sft_notes
from mrl.weights.disk.model_files import name_ends, write_prompt_files
from tests.conftest import TinyModels
from tests.helpers.tiny import tiny_tokenizer
from tests.unit.data.test_sft_data import CHATML, LLAMA3, TALK, learnt, with_template

# like GLM-4.5's template: a turn ends where the next one begins
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' %}{{ '\\n<think></think>' }}{% endif %}{{ '\\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GLM_NAMES = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>")


def glm(folder: Path, template: str = GLM) -> Tokenizer:
    fast = tiny_tokenizer()
    fast.add_tokens([*GLM_NAMES], special_tokens=True)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return load_tokenizer(folder)


def sources(folder: Path, *rows: Any) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"train": str(folder / "rows.jsonl"), "chat_template": True}


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>")])
@pytest.mark.parametrize("form", ["messages", "answers", "messages as answers", "pairs", "labels", "scores"])
def test_every_row_form_says_that_the_template_does_not_write_the_eos(
    tmp_path: Path, template: str, end: str, form: str
) -> None:
    tokenizer = with_template(tmp_path / "tokenizer", template)
    row: dict[str, Any] = {"messages": TALK, "prompt": "1+1?", "answer": "2", "completion": "2", "label": True}
    row |= {"score": 0.5} | ({"chosen": "2", "rejected": "3"} if form == "pairs" else {})
    if form == "messages as answers":
        row["answer"] = TALK[1:2]
    keys = sources(tmp_path, row)
    data: SFTDataset | PreferenceDataset
    if form in ("pairs", "labels", "scores"):
        cfg = (RewardDataConfig if form == "scores" else PreferenceDataConfig).model_validate(keys)
        data = PreferenceDataset(cfg.train, cfg, tokenizer, form)  # type: ignore[arg-type]
        notes = [*preference_notes("data.train", data)]
    else:
        imitated = SFTDataConfig.model_validate(keys | {"form": "messages" if form == "messages" else "answers"})
        data = SFTDataset(imitated.train, imitated, tokenizer)
        notes = [*tokenizer.turn_notes(), *sft_notes("data.train", data)]
    assert any(f"ends the assistant's turns with {end!r}, and the EOS token is '</s>'" in note for note in notes)
    if form == "answers":  # here mrl appends the EOS
        assert data.end_tokens == {tokenizer.eos_id}
    else:
        assert data.end_tokens == {tokenizer.hf.convert_tokens_to_ids(end)}
        assert any(f"the model learns to stop with {end!r}" in note for note in notes)


@pytest.mark.parametrize("command", ["data", "preflight"])
def test_it_is_said_before_anything_starts(
    tmp_path: Path, tiny_models: TinyModels, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    shutil.copytree(tiny_models("llama", vocab_size=272), tmp_path / "model")
    with_template(tmp_path / "model", CHATML)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    (tmp_path / "c.yaml").write_text(
        f"trainer: sft\nrun: {{name: run, steps: 1, root: {tmp_path}}}\nmodel: {{path: {tmp_path}/model}}\n"
        f"data: {{train: {tmp_path}/rows.jsonl, form: messages, chat_template: true}}\nbatch: {{samples_per_step: 1}}\n"
    )
    cli.main([command, str(tmp_path / "c.yaml")])
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "the chat template ends the assistant's turns with '<|im_end|>', and the EOS token is '</s>'" in said


def test_the_ends_that_a_model_had_stay_and_model_eos_token_is_the_tokenizer_s(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/config.json").write_text('{"eos_token_id": [5, 7], "pad_token_id": 0, "model_type": "llama"}')
    with_template(tmp_path / "out", CHATML)
    name_ends(tmp_path / "out", tmp_path / "base", {7}, None)
    assert not (tmp_path / "out/generation_config.json").exists(), "config.json says it already"
    name_ends(tmp_path / "out", tmp_path / "base", {7, 9}, "<|im_end|>")
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {
        "eos_token_id": [5, 7, 9],
        "pad_token_id": 0,
    }
    assert load_tokenizer(tmp_path / "out").hf.eos_token == "<|im_end|>"


def test_a_scorer_whose_new_eos_token_was_the_padding_token_gets_another_one(tmp_path: Path) -> None:
    """transformers scores the last token that is not padding, which must be the EOS token."""
    with_template(tmp_path, CHATML)
    config = {"architectures": ["LlamaForSequenceClassification"], "eos_token_id": 2, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_prompt_files(tmp_path, tmp_path, None, (), "<pad>")
    tokenizer = load_tokenizer(tmp_path).hf
    assert tokenizer.eos_token == "<pad>" and tokenizer.pad_token == "<s>"
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == tokenizer.pad_token_id == 1


def test_glm_s_template_ends_a_turn_with_what_begins_the_next_one(tmp_path: Path) -> None:
    tokenizer = glm(tmp_path / "tokenizer")
    keys = sources(tmp_path, {"messages": TALK}, {"messages": [*TALK, {"role": "observation", "content": "x"}]})
    cfg = SFTDataConfig.model_validate(keys | {"form": "messages"})
    data = SFTDataset(cfg.train, cfg, tokenizer)
    first, last = "\n<think></think>\nTwo.<|user|>", "\n<think></think>\nFour.<|{}|>"
    assert learnt(data) == [(first, 1.0), (last.format("user"), 1.0)]
    assert learnt(data, 1) == [(first, 1.0), (last.format("observation"), 1.0)]
    names = ("<|user|>", "<|observation|>")
    assert data.end_tokens == {*tokenizer.hf.convert_tokens_to_ids([*names])}
    pair = PreferenceDataConfig.model_validate(sources(tmp_path, {"prompt": "1", "chosen": "a", "rejected": "b"}))
    [row] = PreferenceDataset(pair.train, pair, tokenizer, "pairs").rows
    ends = [tokenizer.decode(ids.tolist(), special=True)[-9:] for ids in row.responses]
    assert ends == ["a<|user|>", "b<|user|>"]


def test_a_template_whose_turns_have_no_end_is_refused_with_the_way_out(tmp_path: Path) -> None:
    tokenizer = glm(tmp_path / "tokenizer", "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    keys = sources(tmp_path, {"messages": TALK})
    cfg = SFTDataConfig.model_validate(keys | {"form": "messages"})
    with pytest.raises(DataError, match=r"would not learn to stop: set model.chat_template"):
        SFTDataset(cfg.train, cfg, tokenizer)
    row = {"prompt": "1", "chosen": "<think></think>a", "rejected": "b"}  # control tokens, but none at the end
    pair = PreferenceDataConfig.model_validate(sources(tmp_path, row))
    data = PreferenceDataset(pair.train, pair, tokenizer, "pairs")
    assert data.end_tokens == set()
    assert any("1 pairs without an end token" in note for note in preference_notes("data.train", data))
