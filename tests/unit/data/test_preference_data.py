"""Preference pairs and labelled responses: formats, the end of the prompt, truncation, dropped rows, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mrl.config.schema import PreferenceDataConfig, RewardDataConfig, SourceConfig
from mrl.data import DataError, PreferenceDataset, preference_notes
from mrl.data.preference import mismatched_pairs
from mrl.data.tokenizer import Tokenizer
from tests.helpers.tiny import EOS, tiny_tokenizer

TINY = Tokenizer(tiny_tokenizer(), [])
CHAT = "{% if tools %}[{{ tools[0]['name'] }}]{% endif %}{% if mood %}({{ mood }}){% endif %}"
CHAT += "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


def read(
    folder: Path,
    rows: list[Any],
    form: Any = "pairs",
    tokenizer: Tokenizer = TINY,
    margins: bool = False,
    cuts: bool = True,
    **keys: Any,
) -> PreferenceDataset:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = (SourceConfig(path=str(file)),)
    kind = RewardDataConfig if form == "steps" else PreferenceDataConfig
    cfg = kind(**{"train": sources, "shuffle": False, "max_prompt_tokens": 64, **keys})
    return PreferenceDataset(sources, cfg, tokenizer, form, margins, cuts)


def texts(data: PreferenceDataset, number: int = 0) -> tuple[str, ...]:
    row = data.rows[number]
    return tuple(data.tokenizer.decode(part.tolist(), special=True) for part in (row.prompt, *row.responses))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def chat() -> Tokenizer:
    hf = tiny_tokenizer()
    hf.chat_template = CHAT
    return Tokenizer(hf, [])


def test_text_with_and_without_a_prompt(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2+2=", "chosen": "4", "rejected": "22"},
        {"chosen": "2+2=4", "rejected": "2+2=22"},
        {"chosen": "2+2=4", "rejected": "2+2=4!"},  # one response is a prefix of the other
    ]
    data = read(tmp_path, rows)
    assert texts(data, 0) == texts(data, 1) == ("2+2=", "4</s>", "22</s>")
    assert texts(data, 2) == ("2+2=4", "</s>", "!</s>")
    batch = data.batch(3, [0, 2])
    assert batch.step == 3 and batch.scores.tolist() == [1, 0, 1, 0] and batch.group.tolist() == [0, 0, 1, 1]
    assert batch.rows is not None and batch.rows.tolist() == [0, 0, 2, 2]
    assert batch.tokens[int(batch.seq_lens[0]) - 1] == EOS


def test_conversations_in_every_form_give_the_same_tokens(tmp_path: Path, chat: Tokenizer) -> None:
    rows = [
        {"prompt": [user("hi")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"chosen": [user("hi"), assistant("yes")], "rejected": [user("hi"), assistant("no")]},
    ]
    rows += [
        {"prompt": "hi", "chosen": rows[2]["chosen"], "rejected": rows[2]["rejected"]},  # the responses repeat it
        {"prompt": "hi", "completions": [{"rank": 2, "completion": "no"}, {"rank": 1, "completion": "yes"}]},
        {"completions": [{"rank": 5, "completion": rows[2]["rejected"]}, {"rank": 0, "completion": rows[2]["chosen"]}]},
    ]
    data = read(tmp_path, rows, tokenizer=chat, chat_template=True)
    want = ("<user>hi</s><assistant>", "yes</s>", "no</s>")  # only the template's end of turn
    assert [texts(data, i) for i in range(6)] == [want] * 6


def test_what_the_chat_template_is_told(tmp_path: Path, chat: Tokenizer) -> None:
    row = {"prompt": "hi", "chosen": "yes", "rejected": "no", "system": "be</s>", "tools": '[{"name": "ask"}]'}
    data = read(tmp_path, [row | {"chat_template_kwargs": {"mood": "calm"}}], tokenizer=chat, chat_template=True)
    assert texts(data) == ("[ask](calm)<system>be</s></s><user>hi</s><assistant>", "yes</s>", "no</s>")
    assert data.rows[0].prompt.tolist().count(EOS) == 2, "the row's own is text"
    none = read(tmp_path, [row], tokenizer=chat, chat_template=True, system_key=None, tools_key=None)
    assert texts(none)[0] == "<user>hi</s><assistant>"


RANKED = [{"rank": rank, "completion": text} for rank, text in ((3, "c"), (1, "a"), (2, "b"), (2, "B"))]


def test_ranked_lists(tmp_path: Path) -> None:
    """Ranked lists become extremes or all pairs, or stay lists, best first, with each one's number of worse ones."""
    tied = [{"rank": 1, "completion": text} for text in "xy"]
    rows = [{"context": "1", "completions": RANKED}, {"context": "2", "completions": tied}]
    ends = read(tmp_path, rows, prompt_key="context")
    assert texts(ends) == ("1", "a</s>", "c</s>") and len(ends) == ends.sources[0].tied == 1
    both = read(tmp_path, rows, prompt_key="context", ranked_pairs="all")
    assert [texts(both, i)[1][0] + texts(both, i)[2][0] for i in range(5)] == ["ab", "aB", "ac", "bc", "Bc"]
    assert both.sources[0].tied == 2 and len(both) == 5
    assert any("2 pairs left out: the responses have the same rank" in n for n in preference_notes("data.train", both))
    rows.append({"context": "3", "chosen": "good", "rejected": "bad"})
    lists = read(tmp_path, rows, "lists", prompt_key="context")
    assert texts(lists) == ("1", "a</s>", "b</s>", "B</s>", "c</s>") and lists.rows[0].scores == (3, 1, 1, 0)
    batch = lists.batch(0, [1, 0])
    assert batch.scores.tolist() == [1, 0, 3, 1, 1, 0] and batch.group.tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.rows is not None and batch.rows.tolist() == [2, 2, 0, 0, 0, 0]


def test_margins(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "chosen": "a", "rejected": "b", "margin": m} for m in (2, -0.5)]
    data = read(tmp_path, rows, margins=True)
    assert [row.margin for row in data.rows] == [2.0, -0.5]
    assert any("1 pairs with a margin below 0" in note for note in preference_notes("data.train", data))
    assert read(tmp_path, rows).rows[0].margin is None


def test_halves_of_pairs_are_responses_with_a_label(tmp_path: Path) -> None:
    rows = [{"chosen": "2+2=4", "rejected": "2+2=22"}, {"prompt": "1", "completion": "a", "label": 1}]
    data = read(tmp_path, rows, "labels")
    assert [texts(data, i) for i in range(3)] == [("2+2=", "4</s>"), ("2+2=", "22</s>"), ("1", "a</s>")]
    batch = data.batch(0, [0, 1, 2])
    assert batch.scores.tolist() == [1, 0, 1]
    others = mismatched_pairs(batch, 64)
    assert TINY.decode(others.tokens.tolist()) == "2+2=a" + "2+2=a" + "14", "no half with the other one's prompt"


def test_control_tokens_in_a_conversation_are_text(tmp_path: Path, chat: Tokenizer) -> None:
    data = read(tmp_path, [{"prompt": "hi", "chosen": "a</s>b", "rejected": "c"}], tokenizer=chat, chat_template=True)
    chosen = data.rows[0].responses[0].tolist()
    assert chosen.count(EOS) == 1 and chosen[-1] == EOS
    assert any("tokenized as text, not as control tokens" in note for note in preference_notes("data.train", data))


def test_control_tokens_of_any_response_are_said(tmp_path: Path, chat: Tokenizer) -> None:
    pair = {"prompt": "hi", "chosen": "a", "rejected": "b</s>c"}
    solution = {"prompt": "hi", "completions": ["a", "b</s>c"], "labels": [True, False]}
    for row, form in ((pair, "pairs"), (solution, "steps")):
        for talks, said in ((True, "tokenized as text"), (False, "tokenized as control tokens")):
            data = read(tmp_path, [row], form, chat, chat_template=talks, cuts=False)
            assert data.sources[0].as_text + data.sources[0].as_control == ["</s>"]
            assert any(f"1 rows contain </s>: {said}" in note for note in preference_notes("data.train", data))


def test_the_prompt_ends_before_a_token_that_lies_over_its_end(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "bc": 5}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[("b", "c")], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("\n", "isolated"), decoders.Fuse()
    merging = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>"), [])
    data = read(tmp_path, [{"prompt": "ab", "chosen": "ca", "rejected": "a"}], tokenizer=merging)
    row = data.rows[0]
    assert row.prompt.tolist() == [2], "both halves share a prompt: what is before b and bc"
    assert [part.tolist() for part in row.responses] == [[5, 2, 1], [3, 2, 1]]
    assert data.sources[0].merged == 1
    said = "1 pairs whose prompt is"
    assert any(said in note and "at most 1" in note for note in preference_notes("data.train", data))


def test_what_is_cut_and_left_out_is_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1234", "chosen": "abcdefgh", "rejected": "x"},  # the response is truncated
        {"prompt": "1234567890", "chosen": "a", "rejected": "b"},  # the prompt fills the whole context
        {"prompt": "12", "chosen": "abcdefghij", "rejected": "abcdefghiX"},  # equal after truncation
        {"prompt": "12", "chosen": "same", "rejected": "same"},
        {"prompt": "12", "chosen": "a", "rejected": "b"},
    ]
    data = read(tmp_path, rows, max_prompt_tokens=9, max_tokens=10)
    source = data.sources[0]
    assert (len(data), source.long_prompt, source.same, source.cut) == (2, 1, 2, 1)
    assert texts(data, 0) == ("1234", "abcdef", "x</s>") and data.rows[0].is_cut and not data.rows[1].is_cut
    notes = " ".join(preference_notes("data.train", data))
    assert "1 pairs left out: their prompt" in notes and "2 pairs left out: two responses are equal" in notes
    assert "1 pairs with a response truncated to 10 tokens" in notes
    cut = read(tmp_path, rows[:1], max_prompt_tokens=3, max_tokens=10, truncation="left")
    assert texts(cut)[0] == "234" and cut.sources[0].cut_prompt == 1
    whole = read(tmp_path, rows, max_prompt_tokens=9, max_tokens=10, cuts=False)
    assert (len(whole), whole.sources[0].long_response, whole.sources[0].same) == (1, 2, 1)
    assert any("2 pairs left out: a response does not fit" in note for note in preference_notes("data.train", whole))
    with pytest.raises(DataError, match="none of its 1 rows can be used: 1 left out: their prompt does not fit"):
        read(tmp_path, rows[1:2], max_prompt_tokens=3)


def test_the_prompt_of_a_solution_is_cut_as_any_other(tmp_path: Path) -> None:
    rows = [{"prompt": "1234", "completions": ["a", "b"], "labels": [True, False]}]
    keys = {"cuts": False, "max_prompt_tokens": 3, "step_separator": ""}
    data = read(tmp_path, rows, "steps", truncation="left", **keys)
    assert texts(data) == ("234", "ab") and data.sources[0].cut_prompt == 1
    with pytest.raises(DataError, match="1 left out: their prompt does not fit"):
        read(tmp_path, rows, "steps", truncation="drop", **keys)
    with pytest.raises(DataError, match=r"rows.jsonl:1: 4 tokens, more than data.max_prompt_tokens=3"):
        read(tmp_path, rows, "steps", truncation="error", **keys)


def test_kinds_of_rows_are_text(tmp_path: Path) -> None:
    pair = {"prompt": "1", "chosen": "a", "rejected": "b"}
    kinds = [3, 0.5, True, "sums", None]
    data = read(tmp_path, [pair | {"data_source": kind} for kind in kinds])
    assert [row.source for row in data.rows] == ["3", "0.5", "True", "sums", None]


def test_labels(tmp_path: Path) -> None:
    rows = [{"prompt": "1", "completion": "a", "label": True}, {"prompt": "2", "completion": "bcd", "label": 0}]
    batch = read(tmp_path, rows, "labels").batch(0, [1, 0, 1])
    assert batch.scores.tolist() == [0, 1, 0] and batch.response_lens.tolist() == [4, 2, 4]
    moved = mismatched_pairs(batch, 3)
    assert moved.prompt_lens.tolist() == [1, 1, 1] and moved.response_lens.tolist() == [2, 2, 2]
    assert TINY.decode(moved.tokens.tolist()) == "2a1bc2a"


@pytest.mark.parametrize(
    ("row", "form", "said"),
    [
        (
            {"prompt": "1", "chosen": "a"},
            "pairs",
            "no key 'rejected' (data.rejected_key); the row has: 'prompt', 'chosen'",
        ),
        ({"chosen": [user("a")], "rejected": "b"}, "pairs", "chat messages need data.chat_template: true"),
        ({"prompt": "1", "completion": "a"}, "labels", "no key 'label' (data.label_key)"),
        ({"prompt": "1", "completion": "a", "label": "yes"}, "labels", "'label' must be true or false, not 'yes'"),
        ({"chosen": "abc", "rejected": "xyz"}, "pairs", "no common first token"),
        (["no", "row"], "pairs", "not"),
        ({"prompt": "1", "completions": "a"}, "pairs", "must be a list of two or more completions"),
        ({"prompt": "1", "completions": RANKED[:1]}, "lists", "must be a list of two or more completions"),
        ({"prompt": "1", "completions": ["a", "b"]}, "lists", "completions[0] must have 'rank' and 'completion'"),
        (
            {"prompt": "1", "completions": [*RANKED, {"rank": True, "completion": "a"}]},
            "lists",
            "completions[4].rank must be a number, not True",
        ),
        (
            {"prompt": "1", "completions": [*RANKED, {"rank": 7, "completion": 5}]},
            "pairs",
            "'completions[4].completion' must be text, not int",
        ),
        (
            {"prompt": "1", "chosen": "a", "rejected": "b", "margin": "much"},
            "margins",
            "'margin' must be a finite number, not 'much'",
        ),
        ({"prompt": "1", "chosen": "a", "rejected": "b"}, "margins", "no key 'margin' (data.margin_key)"),
        (
            {"prompt": "1", "chosen": "a", "rejected": "b", "data_source": ["sums"]},
            "pairs",
            "'data_source' (data.data_source_key) must be text or a number, not list",
        ),
    ],
)
def test_rows_of_no_use_are_named_by_file_and_line(tmp_path: Path, row: Any, form: str, said: str) -> None:
    good = {"prompt": "1", "chosen": "a", "rejected": "b", "margin": 1}
    with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path))}/rows.jsonl:2: .*{re.escape(said)}"):
        read(tmp_path, [good, row], "pairs" if form == "margins" else form, margins=form == "margins")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"chosen": [user("hi"), assistant("yes")], "rejected": [user("you"), assistant("no")]},
            "without a prompt, all conversations must begin with the same",
        ),
        (
            {"prompt": "you", "chosen": [user("hi"), assistant("yes")], "rejected": "no"},
            "'chosen' begins with a user message instead of the prompt",
        ),
        (
            {"prompt": "hi", "chosen": "y", "rejected": [assistant("n"), user("oh")]},
            "'rejected' ends with a user message",
        ),
        ({"chosen": "hi", "rejected": "hello"}, "responses are text without a prompt"),
        (
            {"chosen": [user("hi"), assistant("yes")], "rejected": "no"},
            "some responses are text, others lists of messages",
        ),
        ({"prompt": "hi", "chosen": "yes", "rejected": "no", "tools": "[1]"}, "'tools' must be a list of objects"),
        ({"prompt": "hi", "chosen": "yes", "rejected": "no", "tools": "{"}, "'tools' is text, but not JSON"),
        (
            {"prompt": "hi", "chosen": "yes", "rejected": "no", "chat_template_kwargs": {"tokenize": True}},
            "'chat_template_kwargs' has tokenize, which mrl sets itself",
        ),
        (
            {"prompt": [{"role": "system", "content": "a"}], "chosen": "yes", "rejected": "no", "system": "b"},
            "'system' is a system message, and the prompt begins with one too",
        ),
    ],
)
def test_conversations_of_no_use(tmp_path: Path, chat: Tokenizer, row: Any, said: str) -> None:
    with pytest.raises(DataError, match=rf"rows.jsonl:1: .*{re.escape(said)}"):
        read(tmp_path, [row], tokenizer=chat, chat_template=True)


def test_steps_have_every_row_once_an_epoch_and_the_digest_is_of_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(6)]
    data = read(tmp_path, rows, shuffle=True)
    drawn = [data.of_step(step, 2, seed=1) for step in range(6)]
    assert sorted(sum(drawn[:3], [])) == sorted(sum(drawn[3:], [])) == list(range(6)) and drawn[:3] != drawn[3:]
    assert data.digest() == read(tmp_path, rows).digest() != read(tmp_path, rows, max_tokens=2).digest()
    assert torch.equal(data.batch(0, [1]).tokens, read(tmp_path, rows).batch(0, [1]).tokens)
