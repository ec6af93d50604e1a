"""Rows for SFT: which tokens are trained on and with which weight, dropped and truncated rows, and packed texts."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AddedToken
from transformers.utils import chat_template_utils

from mrl.config.schema import PackingConfig, SFTDataConfig
from mrl.data import DataError, SFTDataset, Tokenizer, TokenizerError, load_tokenizer, pack, sft_notes
from mrl.data.packed_rows import PackedRows, best_fit, pieces_of
from mrl.data.sft_source import SFTExample
from mrl.data.wrapped_rows import WrappedRows
from tests.helpers.tiny import tiny_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN25 = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}" + CHATML
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# reasoning of earlier turns is dropped, as in Qwen3
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TALK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four."},
]


def with_template(folder: Path, template: str) -> Tokenizer:
    """Returns a tokenizer with one token per byte, and one for each of the NAMES."""
    fast = tiny_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": [AddedToken(name, special=True) for name in NAMES]})
    fast.chat_template = template
    fast.save_pretrained(folder)
    return load_tokenizer(folder)


def dataset(folder: Path, template: str, *rows: Any, **keys: Any) -> SFTDataset:
    tokenizer = with_template(folder / "tokenizer", template)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = {} if keys.get("form") == "text" else {"chat_template": True}
    cfg = SFTDataConfig.model_validate_json(json.dumps({"train": str(folder / "rows.jsonl"), **chat, **keys}))
    return SFTDataset(cfg.train, cfg, tokenizer)


def learnt(data: SFTDataset, number: int = 0) -> list[tuple[str, float]]:
    """Returns the trained texts of a row, with the weight of their tokens."""
    batch = data.batch(0, [number])
    counts = torch.ones(batch.num_response_tokens) if batch.loss_weights is None else batch.loss_weights
    counts = torch.cat([torch.zeros(int(batch.prompt_lens[0])), counts])
    found: list[tuple[str, float]] = []
    for place in counts.nonzero()[:, 0].tolist():
        if place == 0 or counts[place] != counts[place - 1]:
            found.append(("", float(counts[place])))
        text = data.tokenizer.decode([int(batch.tokens[place])], special=True)
        found[-1] = (found[-1][0] + text, found[-1][1])
    return found


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (MARKED, "<|im_end|>"), (QWEN25, "<|im_end|>"), (LLAMA3, "<|eot_id|>")],
    ids=["chatml", "marked", "qwen2.5", "llama-3"],
)
def test_every_turn_of_the_assistant_is_learnt_with_its_end(tmp_path: Path, template: str, end: str) -> None:
    data = dataset(tmp_path, template, {"messages": TALK}, form="messages")
    assert learnt(data) == [(f"Two.{end}", 1.0), (f"Four.{end}", 1.0)]
    whole = data.tokenizer.render_conversation(TALK)
    assert data.rows[0].ids.tolist() == data.tokenizer.encode_plain([whole])[0]
    last = dataset(tmp_path, template, {"messages": TALK}, form="messages", train_on="last")
    assert learnt(last) == [(f"Four.{end}", 1.0)]


TOOLS = (
    "{% if tools %}<|im_start|>tools {{ tools[0]['name'] }}<|im_end|>{% endif %}{% if mood %}({{ mood }}){% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
@pytest.mark.parametrize("form", ["messages", "answers"])
def test_the_template_is_told_of_tools_and_of_what_else_a_row_says(tmp_path: Path, template: str, form: str) -> None:
    more = {"tools": json.dumps([{"name": "add", "unused": None}]), "chat_template_kwargs": {"mood": "calm"}}
    whole, split = {"messages": TALK[:2]}, {"prompt": TALK[:1], "answer": TALK[1:2]}
    rows = [(whole if form == "messages" else split) | more, whole if form == "messages" else split]
    data = dataset(tmp_path, TOOLS + template, *rows, form=form)
    assert learnt(data) == learnt(data, 1) == [("Two.<|im_end|>", 1.0)]
    texts = [data.tokenizer.decode(row.ids.tolist(), special=True) for row in data.rows]
    assert texts[0] == f"<|im_start|>tools add<|im_end|>(calm){texts[1]}"
    quiet = dataset(tmp_path, TOOLS + template, *rows, form=form, tools_key=None, chat_template_kwargs_key=None)
    assert quiet.rows[0].ids.tolist() == quiet.rows[1].ids.tolist() == data.rows[1].ids.tolist()
    with pytest.raises(DataError, match="'tools' must be a list of objects"):
        dataset(tmp_path, TOOLS + template, rows[1] | {"tools": "[1]"}, form=form)


def test_a_template_of_a_file_takes_the_place_of_the_tokenizer_s(tmp_path: Path) -> None:
    with_template(tmp_path / "tokenizer", CHATML)
    (tmp_path / "mine.jinja").write_text(LLAMA3)
    found = load_tokenizer(tmp_path / "tokenizer", None, str(tmp_path / "mine.jinja"))
    assert found.render_conversation(TALK[:2]).endswith("Two.<|eot_id|>")
    assert f"the chat template is that of {tmp_path / 'mine.jinja'} (model.chat_template)" in found.notes
    with pytest.raises(TokenizerError, match=r"model.chat_template: .*none.jinja cannot be read"):
        load_tokenizer(tmp_path / "tokenizer", None, str(tmp_path / "none.jinja"))


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_a_template_that_writes_today_s_date_gives_the_same_tokens_on_every_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    dated, found = "{{ strftime_now('%Y-%m-%d') }}" + template, []
    for day in (1, 2):
        clock = SimpleNamespace(now=lambda day=day: datetime(2026, 3, day))
        monkeypatch.setattr(chat_template_utils, "datetime", clock)
        data = dataset(tmp_path, dated, {"messages": TALK}, form="messages")
        found.append((data.tokenizer.decode(data.rows[0].ids, special=True), learnt(data)))
    assert found[0] == found[1] and found[0][0].startswith("2024-07-26")
    [note] = [note for note in data.tokenizer.notes if "date" in note]
    assert note.startswith("the chat template writes today's date: mrl fixes it to 26 Jul 2024")


def test_marks_and_differences_give_the_same_tokens(tmp_path: Path) -> None:
    rows = [
        {"messages": [*TALK[:1], {"role": "assistant", "content": text}, *TALK[2:]]} for text in ("\nTwo", "", "é😀")
    ]
    one, other = (dataset(tmp_path, template, *rows, form="messages") for template in (CHATML, MARKED))
    assert [learnt(one, i) for i in range(3)] == [learnt(other, i) for i in range(3)]
    assert learnt(one, 1)[0] == ("<|im_end|>", 1.0), "an empty turn has an end"


def test_names_of_control_tokens_in_a_message_are_text_and_end_no_turn(tmp_path: Path) -> None:
    talk = [*TALK[:1], {"role": "assistant", "content": "say <|im_end|> now"}]
    for template in (CHATML, MARKED):
        data = dataset(tmp_path, template, {"messages": talk}, form="messages")
        end = data.tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
        assert learnt(data) == [("say <|im_end|> now<|im_end|>", 1.0)]
        assert data.rows[0].ids.tolist().count(end) == 2, "of the user's turn and the assistant's"
        assert "tokenized as text, not as control tokens" in " ".join(sft_notes("data.train", data))


def test_icons_are_text_and_what_stands_for_control_tokens_is_refused(tmp_path: Path) -> None:
    icons = "\U000f02a2 \U00100185"  # characters of Nerd Fonts and of SF Symbols
    talk, forged = ([*TALK[:1], {"role": "assistant", "content": text}] for text in (icons, icons + "<|im_end|>"))
    data = dataset(tmp_path, CHATML, {"messages": talk}, {"messages": forged}, form="messages")
    plain, whole = (data.tokenizer.render_conversation(each) for each in (talk, forged))
    assert data.rows[0].ids.tolist() == data.tokenizer.hf(plain, add_special_tokens=False)["input_ids"]
    assert data.tokenizer.decode(data.rows[1].ids.tolist(), special=True) == whole
    assert data.rows[1].ids.tolist().count(data.tokenizer.hf.convert_tokens_to_ids("<|im_end|>")) == 2
    for kept in ("\U0010a000", "\U0010a000 <|im_end|>"):
        talk = [*TALK[:1], {"role": "assistant", "content": kept}]
        with pytest.raises(DataError, match=r"rows.jsonl:1: it contains the character U\+10A000, which mrl reserves"):
            dataset(tmp_path, CHATML, {"messages": talk}, form="messages")


def test_weights_of_rows_and_messages_are_multiplied(tmp_path: Path) -> None:
    weighed = [TALK[0], TALK[1] | {"weight": 0}, TALK[2], TALK[3] | {"weight": 0.5}]
    rows = ({"messages": weighed, "w": 4}, {"messages": TALK}, {"messages": [TALK[0], TALK[1] | {"weight": 0}]})
    data = dataset(tmp_path, CHATML, *rows, form="messages", weight_key="w")
    assert learnt(data) == [("Four.<|im_end|>", 2.0)] and learnt(data, 1)[0][1] == 1.0
    assert data.sources[0].unlearnt == 1 and len(data) == 2
    assert "1 rows left out: they have no token to train on" in " ".join(sft_notes("data.train", data))
    batch = data.batch(0, [0, 1])
    assert float(batch.normalized_loss_weights.sum()) == pytest.approx(1)
    packed = pack(batch, [0, 1], cp=1, cp_rank=0, align_total=1)
    assert packed.response_indices.tolist() == batch.loss_weights.nonzero()[:, 0].tolist(), (
        "nothing is computed for what is not learnt"
    )
    assert packed.labels.tolist() == torch.cat([batch.tokens[packed.output_positions + 1]]).tolist()
    with pytest.raises(DataError, match=r"rows.jsonl:1: 'weight' must be a number of at least 0, not -1"):
        dataset(tmp_path, CHATML, {"messages": [TALK[0], TALK[1] | {"weight": -1}]}, form="messages")


def test_kinds_of_rows_are_text(tmp_path: Path) -> None:
    rows = [{"messages": TALK, "data_source": kind} for kind in (3, "sums", None)]
    data = dataset(tmp_path, CHATML, *rows, form="messages")
    assert [row.source for row in data.rows] == ["3", "sums", None]
    with pytest.raises(DataError, match=r"rows.jsonl:1: 'data_source' .*must be text or a number, not dict"):
        dataset(tmp_path, CHATML, {"messages": TALK, "data_source": {"a": 1}}, form="messages")


@pytest.mark.parametrize("marks", [False, True])
def test_turns_that_change_later_are_learnt_as_the_last_one_only(tmp_path: Path, marks: bool) -> None:
    template = FORGETFUL
    if marks:
        said = "{% if not loop.last %}{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
        template = MARKED.replace("{% generation %}{{ m['content'] }}", "{% generation %}" + said)
    talk = [
        TALK[0],
        {"role": "assistant", "content": "<think>hm</think>Two."},
        TALK[2],
        {"role": "assistant", "content": "<think>so</think>4"},
    ]
    with pytest.raises(
        DataError, match="formats earlier turns differently once later ones follow: set data.train_on: last"
    ):
        dataset(tmp_path, template, {"messages": talk}, form="messages")
    data = dataset(tmp_path, template, {"messages": talk}, form="messages", train_on="last")
    assert learnt(data) == [("<think>so</think>4<|im_end|>", 1.0)]
    plain = dataset(tmp_path, template, {"messages": TALK}, form="messages")
    assert len(learnt(plain)) == 2, "without thoughts nothing changes"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML.replace("<|im_end|>\n", "END\n"), "ends a turn with .*would not learn to stop"),
        (MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"), "would not learn to stop"),
        (MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'model'"), "marks 0 parts of a conversation with 2"),
        (CHATML.replace("assistant\n{% endif %}", "bot\n{% endif %}"), "a finished turn differently"),
    ],
)
def test_a_template_that_would_teach_something_else_is_refused(tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises(DataError, match=rf"(?s)rows.jsonl:1: .*{said}"):
        dataset(tmp_path, template, {"messages": TALK}, form="messages", train_on="last")


def test_a_conversation_without_the_assistant_is_left_out(tmp_path: Path) -> None:
    data = dataset(tmp_path, CHATML, {"messages": TALK[:1]}, {"messages": TALK}, form="messages")
    assert len(data) == 1 and data.sources[0].unlearnt == 1
    with pytest.raises(DataError, match="none of its 1 rows can be used: .* 1 have no token to train on"):
        dataset(tmp_path, CHATML, {"messages": TALK[:1]}, form="messages")


def test_an_answer_of_messages_follows_the_prompt_s(tmp_path: Path) -> None:
    data = dataset(tmp_path, CHATML, {"prompt": TALK[:3], "answer": TALK[3:]}, {"prompt": "1+1?", "answer": TALK[1:2]})
    assert learnt(data) == [("Four.<|im_end|>", 1.0)] and learnt(data, 1) == [("Two.<|im_end|>", 1.0)]


def test_everything_is_learnt_but_the_first_token(tmp_path: Path) -> None:
    row = {"prompt": "ab", "answer": "cd"}
    assert learnt(dataset(tmp_path, CHATML, row, chat_template=False)) == [("cd</s>", 1.0)]
    assert learnt(dataset(tmp_path, CHATML, row, chat_template=False, completion_only=False)) == [("bcd</s>", 1.0)]
    assert learnt(dataset(tmp_path, CHATML, {"text": "abcd"}, form="text")) == [("bcd</s>", 1.0)]
    talk = dataset(tmp_path, CHATML, {"messages": TALK[:2]}, form="messages", completion_only=False)
    assert learnt(talk)[0][0].startswith("user\n1+1?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>")


def test_rows_are_cut_at_their_end_and_counted(tmp_path: Path) -> None:
    rows = ({"prompt": "ab", "answer": "cdefg"}, {"prompt": "a", "answer": "b"}, {"prompt": "abcdef", "answer": "b"})
    data = dataset(tmp_path, CHATML, *rows, chat_template=False, max_tokens=5, max_prompt_tokens=4)
    assert learnt(data) == [("cde", 1.0)] and learnt(data, 1) == [("b</s>", 1.0)]
    assert [row.is_cut for row in data.rows] == [True, False] and data.sources[0].long_prompt == 1
    notes = " ".join(sft_notes("data.train", data))
    assert "1 rows truncated to 5 tokens: they have no end" in notes and "1 rows left out: their prompt" in notes
    late = dataset(
        tmp_path, CHATML, {"messages": TALK}, {"messages": TALK[:2]}, form="messages", max_tokens=26, train_on="last"
    )
    assert len(late) == 1 and late.sources[0].unlearnt == 1, "the turn lies behind the cut"


def by_hand(data: SFTDataset, epoch: int, length: int, buffer: int) -> list[list[list[int]]]:
    """Returns the rows of an epoch by buffer, before they are shuffled."""
    buffers: list[list[list[int]]] = []
    joined: list[int] = []
    texts = [data.rows[number].ids.tolist() for number in data.of_step(epoch, len(data), 3)]
    for place, text in enumerate(texts):
        joined += text
        if len(joined) >= buffer * length or place == len(texts) - 1:
            rows = [joined[i : i + length] for i in range(0, len(joined), length)]
            buffers.append([row for row in rows if len(row) == length])
            joined = []
    return buffers


@pytest.mark.parametrize("shuffle", [False, True])
def test_wrapped_texts_are_a_join_by_hand(tmp_path: Path, shuffle: bool) -> None:
    rows = [{"text": "".join(chr(97 + (7 * n + i) % 26) for i in range(5 + 3 * n % 17))} for n in range(23)]
    data = dataset(tmp_path, CHATML, *rows, form="text", shuffle=shuffle)
    cfg = PackingConfig(strategy="wrapped", seq_length=16, num_of_sequences=4)
    wrapped = WrappedRows(data, cfg, seed=3)
    wanted = by_hand(data, 0, 16, 4)
    assert len(wrapped) == sum(map(len, wanted)) > 10 and len(wanted) > 2
    batch = wrapped.batch(0, len(wrapped))
    assert batch.loss_weights is None and batch.prompt_lens.unique().tolist() == [1]
    got = batch.tokens.view(-1, 16).tolist()
    for buffer in wanted:
        part, got = got[: len(buffer)], got[len(buffer) :]
        assert sorted(part) == sorted(buffer) and (part == buffer or shuffle)
    again = [row for buffer in by_hand(data, 1, 16, 4) for row in buffer]
    later = WrappedRows(data, cfg, seed=3).batch(len(wrapped), 1)  # as in a run resumed there
    assert later.tokens.tolist() in again
    assert (sorted(again) == sorted(row for buffer in wanted for row in buffer)) == (not shuffle)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
def test_packs_hold_every_row_once_and_no_more_tokens_than_they_may(tmp_path: Path, strategy: Any) -> None:
    rows = [{"text": chr(97 + n) * (2 + 5 * n % 23)} for n in range(24)]
    data = dataset(tmp_path, CHATML, *rows, form="text", max_tokens=16 if strategy == "bfd" else None)
    made = PackedRows(data, PackingConfig(strategy=strategy, seq_length=16), seed=3)
    packs = [made.batch(number, 1) for number in range(len(made))]
    assert all(int(pack.seq_lens.sum()) <= 16 for pack in packs)
    fewest = -(-sum(len(row.ids) for row in data.rows) // 16)
    assert fewest <= len(packs) <= fewest + 2, "best fit leaves hardly any room"
    seen = sorted(ids.tolist() for pack in packs for ids in pack.tokens.split(pack.seq_lens.tolist()))
    whole = [row.ids.tolist() for row in data.rows]
    parts = [row[i : i + 16] for row in whole for i in range(0, len(row), 16)]
    assert seen == sorted(part for part in parts if len(part) > 1)  # a single token is never trained on
    later = PackedRows(data, PackingConfig(strategy=strategy, seq_length=16), seed=3).batch(len(made), 1)
    assert later.tokens.tolist() not in [pack.tokens.tolist() for pack in packs[:1]], "the second epoch is another"


def test_best_fit_by_hand() -> None:
    assert best_fit([3, 7, 5, 2, 4, 9], 10) == [[5], [1, 0], [2, 4], [3]]
    assert best_fit([6, 4, 3, 7], 10) == [[3, 2], [0, 1]]
    assert best_fit([5, 6, 4], 10) == [[1, 2], [0]], "4 goes where it leaves no room, not where there is more of it"


def test_a_split_row_is_learnt_as_it_would_be_whole() -> None:
    """A split row is trained like the whole row, except for the first token of each later part, which has no context.
    Weights of zero stay zero."""
    row = SFTExample(4, np.arange(10, dtype=np.int32), 3, np.array([1, 0, 1, 1, 2, 0, 0], dtype=np.float32), "s", False)
    first, second, *rest = pieces_of(row, 4)
    parts = [(part.ids.tolist(), part.prompt, part.weights) for part in (first, second)]
    assert [part[:2] for part in parts] == [([0, 1, 2, 3], 3), ([4, 5, 6, 7], 1)]
    assert [part[2].tolist() for part in parts if part[2] is not None] == [[1], [1, 1, 2]]
    assert rest == [], "of the last part nothing counts"


def test_texts_that_come_once_or_fill_no_row(tmp_path: Path) -> None:
    data = dataset(tmp_path, CHATML, {"text": "abcdefg"}, {"text": "hijklmn"}, form="text")
    once = WrappedRows(data, PackingConfig(strategy="wrapped", seq_length=4, infinite=False), seed=3)
    once.require(4)
    with pytest.raises(DataError, match="4 rows of packing.seq_length=4 tokens, and the run needs 5"):
        once.require(5)
    with pytest.raises(DataError, match="16 tokens, including EOS, do not fill one row of packing.seq_length=17"):
        WrappedRows(data, PackingConfig(strategy="wrapped", seq_length=17), seed=3)
