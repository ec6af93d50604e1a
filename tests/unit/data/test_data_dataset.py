"""Data sets, tokenizer corrections, collation, and the sorting task's generator."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.schema import DataConfig
from mrl.core import Prompt, Request, Sample
from mrl.data import DataError, PromptDataset, Tokenizer, TokenizerError, collate, load_tokenizer
from mrl.families import load_arch

TOOL = Path(__file__).parents[3] / "tools" / "make_sort_task.py"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("task")
    arguments = [str(TOOL), str(out), "--train-rows", "60", "--validation-rows", "20", "--digits", "2"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        runpy.run_path(str(TOOL), run_name="__main__")
    return out


@pytest.fixture(scope="module")
def tokenizer(task: Path) -> Tokenizer:
    return load_tokenizer(task / "model_init")


def write(path: Path, *lines: str | dict[str, Any]) -> Path:
    path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    return path


def config(**keys: Any) -> DataConfig:
    return DataConfig(train="unused", **keys)


def test_sort_task(task: Path, tokenizer: Tokenizer) -> None:
    rows = {n: [json.loads(x) for x in (task / f"data/{n}.jsonl").open()] for n in ("train", "validation")}
    assert (len(rows["train"]), len(rows["validation"])) == (60, 20)
    assert all(sorted(r["prompt"][:-1]) == list(r["answer"]) and r["prompt"][-1] == "=" for r in rows["train"])
    assert not {r["prompt"] for r in rows["train"]} & {r["prompt"] for r in rows["validation"]}
    [ids] = tokenizer.encode_prompts(["31="])
    assert len(ids) == 3 and tokenizer.decode(ids) == "31="
    assert tokenizer.decode([*ids, tokenizer.eos_id, tokenizer.pad_id]) == "31="
    arch = load_arch(task / "model_init")
    assert arch.eos_token_ids == (tokenizer.eos_id,)
    assert arch.vocab_size == len(tokenizer.hf) and arch.vocab_size % 2 == arch.num_kv_heads % 2 == 0


def test_tokenizer_corrections_are_said(task: Path, tmp_path: Path) -> None:
    source = task / "model_init"
    assert load_tokenizer(source).notes == []
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    del settings["eos_token"], settings["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path)
    notes = tokenizer.notes
    assert tokenizer.hf.eos_token == tokenizer.hf.pad_token == "<eos>" and tokenizer.pad_id == tokenizer.eos_id
    assert len(notes) == 2 and "EOS" in notes[0] and "PAD" in notes[1]
    (tmp_path / "config.json").unlink()
    with pytest.raises(TokenizerError, match="neither the tokenizer nor config.json names an EOS token"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path / "nowhere")


def test_another_eos_token_by_name(task: Path) -> None:
    tokenizer = load_tokenizer(task / "model_init", eos_token="=")
    assert tokenizer.eos_id == tokenizer.encode_plain(["="])[0][0]
    assert tokenizer.notes == ["the EOS token is '=' (model.eos_token) instead of the tokenizer's '<eos>'"]
    assert load_tokenizer(task / "model_init", eos_token="<eos>").notes == []
    with pytest.raises(TokenizerError, match="model.eos_token '<end>' is not in the vocabulary"):
        load_tokenizer(task / "model_init", eos_token="<end>")


def test_a_chat_template_that_ends_turns_otherwise_is_said(task: Path) -> None:
    tokenizer = load_tokenizer(task / "model_init")
    tokenizer.hf.chat_template = "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
    [note] = tokenizer.turn_notes()
    assert "ends the assistant's turns with '<pad>', and the EOS token is '<eos>': set model.eos_token: '<pad>'" in note
    for template in ("{{ messages[1].content }}<eos>", "{{ messages[1].content }}=", "{{ raise_exception('no') }}"):
        tokenizer.hf.chat_template = template
        assert tokenizer.turn_notes() == []


def test_a_trailing_eos_of_the_tokenizer_is_left_out_of_prompts(task: Path) -> None:
    from tokenizers import processors

    tokenizer = load_tokenizer(task / "model_init")
    [plain] = tokenizer.encode_prompts(["12="])
    tokenizer.hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A <eos>", special_tokens=[("<eos>", tokenizer.eos_id)]
    )
    assert tokenizer.encode_prompts(["12="]) == [[tokenizer.eos_id, *plain]]


def test_prompts_for_step_is_a_pure_permutation_of_every_epoch(task: Path, tokenizer: Tokenizer) -> None:
    data = PromptDataset(task / "data/train.jsonl", config(), tokenizer)
    steps = [[p.index for p in data.prompts_for_step(s, 7, seed=3)] for s in range(60)]
    flat = [i for step in steps for i in step]
    epochs = [flat[i : i + 60] for i in range(0, 420, 60)]
    assert all(sorted(e) == list(range(60)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 7
    fresh = PromptDataset(task / "data/train.jsonl", config(), tokenizer)
    assert [p.index for p in fresh.prompts_for_step(31, 7, seed=3)] == steps[31]
    assert [p.index for p in fresh.prompts_for_step(31, 7, seed=4)] != steps[31]
    ordered = PromptDataset(task / "data/train.jsonl", config(shuffle=False), tokenizer)
    assert [p.index for p in ordered.prompts_for_step(8, 7, seed=3)] == [56, 57, 58, 59, 0, 1, 2]
    assert [p.index for p in ordered.first(3)] == [0, 1, 2]
    assert len(ordered.first(1000)) == 60


def test_too_long_prompts_are_dropped_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1=", "id": 0}, {"prompt": "12345="}, {"prompt": "22=", "id": 2})
    data = PromptDataset(path, config(max_prompt_tokens=3), tokenizer)
    assert data.sources[0].dropped == 1
    assert [(p.index, p.row["id"], len(p.token_ids)) for p in data.first(9)] == [(0, 0, 2), (2, 2, 3)]
    with pytest.raises(DataError, match="all 3 prompts have more than data.max_prompt_tokens=1 tokens"):
        PromptDataset(path, config(max_prompt_tokens=1), tokenizer)


def test_every_bad_row_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "1="}, "", '{"prompt": ', "[1, 2]")
    with pytest.raises(DataError) as error:
        PromptDataset(path, config(), tokenizer)
    assert f"{path}:3: not valid JSON" in str(error.value)
    assert f"{path}:4: a row must be a JSON object, not list" in str(error.value)

    path = write(tmp_path / "keys.jsonl", {"prompt": "1="}, "", {"question": "1"}, {"prompt": 3}, {"prompt": [{}]})
    with pytest.raises(DataError) as error:
        PromptDataset(path, config(), tokenizer)
    assert f"{path}:3: no key 'prompt' (data.prompt_key); the row has: 'question'" in str(error.value)
    assert f"{path}:4: 'prompt' must be text, not int" in str(error.value)
    assert f"{path}:5: 'prompt' must be text, not list; chat messages need data.chat_template: true" in str(error.value)

    path = write(tmp_path / "many.jsonl", *[{"x": 1}] * 25)
    with pytest.raises(DataError, match="and 15 more rows"):
        PromptDataset(path, config(), tokenizer)
    with pytest.raises(DataError, match=":1: the prompt has no tokens"):
        PromptDataset(write(tmp_path / "blank.jsonl", {"prompt": ""}), config(), tokenizer)
    with pytest.raises(DataError, match="no rows"):
        PromptDataset(write(tmp_path / "empty.jsonl"), config(), tokenizer)
    with pytest.raises(DataError, match="does not exist"):
        PromptDataset(tmp_path / "nowhere.jsonl", config(), tokenizer)


def test_missing_answers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "1=", "answer": "1"}, {"prompt": "2="}, {"prompt": "3=", "answer": 3})
    with pytest.raises(DataError) as error:
        PromptDataset(path, config(), tokenizer, require_answer=True)
    assert f"{path}:2: no key 'answer' (data.answer_key)" in str(error.value)
    assert f"{path}:3: 'answer' must be text, not int" in str(error.value)
    data = PromptDataset(path, config(shuffle=False), tokenizer)
    assert data.sft_rollout(0, 1, 0).num_samples == 1
    with pytest.raises(DataError, match=":2: no key 'answer'"):
        data.sft_rollout(0, 2, 0)


def test_sft_rollout(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"q": "21=", "a": "12"}, {"q": "543=", "a": "345"}, {"q": "9=", "a": ""})
    data = PromptDataset(path, config(prompt_key="q", answer_key="a", shuffle=False), tokenizer)
    rollout = data.sft_rollout(0, 3, seed=0)
    assert tokenizer.hf.decode(rollout.tokens) == "21=12<eos>543=345<eos>9=<eos>"
    assert rollout.seq_lens.tolist() == [6, 8, 3]
    assert rollout.response_lens.tolist() == [3, 4, 1]
    assert rollout.scores.tolist() == [0.0] * 3 and rollout.rollout_log_probs.tolist() == [0.0] * 8


def test_chat_template(task: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(task / "model_init")
    messages = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]
    path = write(tmp_path / "chat.jsonl", {"prompt": messages}, {"prompt": "45"})
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        PromptDataset(path, config(chat_template=True), tokenizer)
    tokenizer.hf.chat_template = (
        "{% for m in messages %}{{ '+' if m.role == 'user' else '-' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    data = PromptDataset(path, config(chat_template=True), tokenizer)
    assert [tokenizer.decode(p.token_ids) for p in data.first(9)] == ["+12-3=", "+45="]
    assert [p.text for p in data.first(9)] == ["+12-3=", "+45="]
    bad = write(tmp_path / "bad.jsonl", {"prompt": [{"role": "user"}]})
    with pytest.raises(DataError, match="list of messages with 'role' and 'content'"):
        PromptDataset(bad, config(chat_template=True), tokenizer)


def sample(sample_id: int, prompt: tuple[int, ...], response: list[int], group: int = 0, score: float = 0.0) -> Sample:
    request = Request(sample_id, group, Prompt(0, prompt, {}), seed=0)
    return Sample(request, response, [-0.5 * t for t in response], "stop", "0", score=score)


def test_collate_orders_by_sample_id() -> None:
    samples = [sample(1, (7,), [8, 9, 10], group=1, score=0.5), sample(0, (1, 2), [3], group=0, score=1.0)]
    rollout = collate(4, samples)
    assert rollout.step == 4
    assert rollout.tokens.tolist() == [1, 2, 3, 7, 8, 9, 10] and rollout.tokens.dtype == torch.int64
    assert rollout.seq_lens.tolist() == [3, 4] and rollout.prompt_lens.tolist() == [2, 1]
    assert rollout.group.tolist() == [0, 1] and rollout.scores.tolist() == [1.0, 0.5]
    assert rollout.rollout_log_probs.tolist() == [-1.5, -4.0, -4.5, -5.0]
    assert rollout.weight_versions is not None and rollout.weight_versions.tolist() == [0, 0]


def test_collate_refuses_incomplete_samples() -> None:
    with pytest.raises(ValueError, match="expected sample 1, got sample 2"):
        collate(0, [sample(0, (1,), [2]), sample(2, (1,), [2])])
    with pytest.raises(ValueError, match="sample 0 has no response tokens"):
        collate(0, [sample(0, (1,), [])])
    broken = sample(0, (1,), [2, 3])
    broken.log_probs = broken.log_probs[1:]
    with pytest.raises(ValueError, match="sample 0 has 2 response tokens and 1 log-probs"):
        collate(0, [broken])
    with pytest.raises(ValueError, match="no samples"):
        collate(3, [])
    unnamed = sample(0, (1,), [2])
    unnamed.weight_version = "3-ema"
    with pytest.raises(ValueError, match="sample 0 has the weight version '3-ema', which is not a number"):
        collate(2, [unnamed])
