"""Sources of rows: formats, nested keys, mixing, truncation, and notes about unusable rows."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.config import reasoning_tasks, verifiers_environments
from mrl.config.checks.data import Unreadable, read_columns
from mrl.config.schema import DataConfig, SourceConfig
from mrl.data import DataError, PromptDataset, Tokenizer, data_notes
from mrl.data.mixture import Mixture
from tests.helpers.tiny import tiny_tokenizer

ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n), "n": n} for n in range(5)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token per byte (3 + its index in the byte alphabet) and no BOS."""
    return Tokenizer(tiny_tokenizer(), [])


def prompts(tokenizer: Tokenizer, *sources: SourceConfig, **keys: Any) -> PromptDataset:
    return PromptDataset(sources, DataConfig(train="unused", **keys), tokenizer)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def every_format(folder: Path) -> Iterator[SourceConfig]:
    table = datasets.Dataset.from_list(ROWS)
    yield SourceConfig(path=write(folder / "rows.jsonl", ROWS))
    yield SourceConfig(path=write(folder / "lines.json", ROWS))
    (folder / "list.json").write_text(json.dumps(ROWS, indent=1))
    yield SourceConfig(path=str(folder / "list.json"))
    table.to_parquet(folder / "rows.parquet")
    yield SourceConfig(path=str(folder / "rows.parquet"))
    table.save_to_disk(folder / "saved")
    yield SourceConfig(path=str(folder / "saved"))
    splits = datasets.DatasetDict({"train": table, "test": table.select([0])})
    splits.save_to_disk(folder / "splits")
    yield SourceConfig(path=str(folder / "splits"), split="train")
    for name, part in splits.items():
        (folder / "hub/data").mkdir(parents=True, exist_ok=True)
        part.to_parquet(folder / f"hub/data/{name}-00000-of-00001.parquet")
    yield SourceConfig(path=str(folder / "hub"), split="train")


def test_every_format_gives_the_same_prompts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for source in every_format(tmp_path):
        data = prompts(tokenizer, source)
        found = data.first(9)
        assert [(p.index, p.text, p.row) for p in found] == [(i, r["prompt"], r) for i, r in enumerate(ROWS)], source
        assert all(tokenizer.decode(p.token_ids) == p.text for p in found)
        assert [p.index for p in data.prompts_for_step(3, 4, seed=1)] == [
            p.index for p in prompts(tokenizer, source).prompts_for_step(3, 4, seed=1)
        ]


def test_rows_of_json_stay_as_they_were_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """JSON rows keep their own keys and types. A table would give each row all keys, and all answers one type."""
    rows = [{"prompt": "a", "answer": 1, "meta": {"x": 1}}, {"prompt": "b", "answer": "2", "meta": {"y": None}}]
    data = prompts(tokenizer, SourceConfig(path=write(tmp_path / "rows.jsonl", rows)))
    assert [p.row for p in data.first(2)] == rows


def test_a_row_is_named_by_file_and_place(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"prompt": "a"}, {"prompt": ""}]
    (tmp_path / "list.json").write_text(json.dumps([*rows, 7, {"question": "a"}]))
    with pytest.raises(DataError) as error:
        prompts(tokenizer, SourceConfig(path=str(tmp_path / "list.json")))
    lines = str(error.value).splitlines()
    assert lines == [
        f"{tmp_path}/list.json, row 2: a row must be a JSON object, not int",
        f"{tmp_path}/list.json, row 3: no key 'prompt' (data.prompt_key); the row has: 'question'",
        f"{tmp_path}/list.json, row 1: the prompt has no tokens",
    ]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"saved\[train\], row 1: the prompt has no tokens"):
        prompts(tokenizer, SourceConfig(path=str(tmp_path / "saved"), split="train"))


def test_what_cannot_be_read_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    table = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"a": table, "b": table}).save_to_disk(tmp_path / "two")
    table.save_to_disk(tmp_path / "one")
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "bad.json").write_text("[1, 2")
    (tmp_path / "rows.csv").write_text("prompt\n")
    (tmp_path / "empty").mkdir()
    for path, split, says in [
        ("two", None, "choose a split"),
        ("two", "c", "it has no split 'c'"),
        ("one", "a", "the data set has no splits: leave out split 'a'"),
        ("bad.parquet", None, "the datasets library cannot read it: .*[Pp]arquet"),
        ("bad.json", None, "not valid JSON"),
        ("rows.csv", None, "expected .jsonl, .json, .parquet or a directory"),
        ("empty", None, "the datasets library cannot read it"),
        ("gone.jsonl", None, "does not exist"),
    ]:
        with pytest.raises(DataError, match=rf"{path}.*{says}"):
            prompts(tokenizer, SourceConfig(path=str(tmp_path / path), split=split))


def test_rows_as_verl_prepares_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Reads rows in verl's format: messages in a table, each with all keys and nulls, and a nested answer."""
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2?", "name": "ann"}]
    row = {"data_source": "sums", "prompt": conversation, "reward_model": {"ground_truth": "2", "style": "rule"}}
    plain = {"data_source": None, "prompt": conversation[:1], "reward_model": {"ground_truth": "3", "style": "rule"}}
    datasets.Dataset.from_list([row, plain]).to_parquet(tmp_path / "rows.parquet")
    tokenizer.hf.chat_template = (
        "{% for m in messages %}{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}: {{ m.content }}\n"
        "{% endfor %}"
    )
    keys = {"chat_template": True, "answer_key": "reward_model.ground_truth"}
    source = SourceConfig(path=str(tmp_path / "rows.parquet"), name="others")
    first, second = prompts(tokenizer, source, **keys).first(2)
    assert first.text == "system: be brief\nuser ann: 2?\n" and second.text == "system: be brief\n"
    assert first.row["reward_model.ground_truth"] == "2" and second.row["reward_model.ground_truth"] == "3"
    assert (first.row["data_source"], second.row["data_source"]) == ("sums", "others")


def test_a_conversation_that_the_template_refuses_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.hf.chat_template = "{{ raise_exception('roles must alternate') if messages|length > 1 else 'x' }}"
    message = {"role": "user", "content": "a"}
    path = write(tmp_path / "rows.jsonl", [{"prompt": [message]}, {"prompt": [message, message]}])
    with pytest.raises(DataError, match=r"rows.jsonl:2: the chat template rejects it: roles must alternate"):
        prompts(tokenizer, SourceConfig(path=path), chat_template=True)


@pytest.mark.parametrize(
    ("truncation", "kept", "note"),
    [
        ("left", "6789", "3 prompts truncated to 4 tokens at the beginning"),
        ("right", "0123", "3 prompts truncated to 4 tokens at the end"),
        ("middle", "0189", "3 prompts truncated to 4 tokens in the middle"),
        ("drop", None, "3 prompts left out: longer than 4 tokens (data.max_prompt_tokens)"),
    ],
)
def test_long_prompts_are_cut_or_left_out(
    truncation: str, kept: str | None, note: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = [{"prompt": text} for text in ("0123456789", "0123", "01", "0123456789", "0123456789")]
    source = SourceConfig(path=write(tmp_path / "rows.jsonl", rows))
    data = prompts(tokenizer, source, max_prompt_tokens=4, truncation=truncation)
    texts = [kept, "0123", "01", kept, kept] if kept else ["0123", "01"]
    assert [tokenizer.decode(p.token_ids) for p in data.first(9)] == texts
    assert [p.text for p in data.first(9)] == texts, "the text is what the model sees"
    assert data.first(1)[0].row["prompt"] == ("0123456789" if kept else "0123"), "the row is not changed"
    assert data_notes(tokenizer, {"data.train": data}) == [f"data.train: {note}"]


def test_long_prompts_can_be_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = SourceConfig(path=write(tmp_path / "rows.jsonl", [{"prompt": "012"}, {"prompt": "01234"}]))
    with pytest.raises(DataError, match=r"rows.jsonl:2: 5 tokens, more than data.max_prompt_tokens=4"):
        prompts(tokenizer, source, max_prompt_tokens=4, truncation="error")


def two_sources(folder: Path, *weights: float) -> list[SourceConfig]:
    sizes = {"a": 6, "b": 2}
    paths = [write(folder / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(n)]) for name, n in sizes.items()]
    return [SourceConfig(path=path, weight=weight) for path, weight in zip(paths, weights or (None, None), strict=True)]


def test_sources_without_weights_are_one_data_set(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = prompts(tokenizer, *two_sources(tmp_path))
    epochs = [[p.text for p in data.prompts_for_step(step, 8, seed=1)] for step in range(4)]
    assert all(len(set(epoch)) == 8 for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) == 4
    assert [data.where(p).rpartition("/")[2] for p in data.first(8) if p.text in ("a5", "b0")] == [
        "b.jsonl:1",
        "a.jsonl:6",
    ]
    assert {p.text: p.index for p in data.first(8)} == {f"a{i}": i for i in range(6)} | {"b0": 6, "b1": 7}


def test_weights_are_shares_of_the_prompts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = prompts(tokenizer, *two_sources(tmp_path, 1.0, 3.0))
    drawn = [p.text for step in range(6) for p in data.prompts_for_step(step, 8, seed=1)]
    counts = Counter(drawn)
    assert {name: n for name, n in counts.items() if name[0] == "b"} == {"b0": 18, "b1": 18}
    assert sorted(n for name, n in counts.items() if name[0] == "a") == [2] * 6
    again = [p.text for step in range(12) for p in data.prompts_for_step(step, 4, seed=1)]
    assert again == drawn, "the order depends on how many prompts a step takes"
    assert [p.text for step in range(6) for p in data.prompts_for_step(step, 8, seed=2)] != drawn


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    weights=st.none() | st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    start=st.integers(0, 10**7),
    count=st.integers(1, 300),
)
def test_a_mixture_is_even_everywhere(sizes: list[int], weights: list[float] | None, start: int, count: int) -> None:
    mixture = Mixture(sizes, weights and weights[: len(sizes)])
    source, epoch, place = mixture.rows_at(np.arange(start, start + count))
    wanted = np.asarray(sizes if weights is None else weights[: len(sizes)], dtype=float)
    shares = wanted / wanted.sum()
    assert mixture.shares == pytest.approx(shares, abs=2e-4)
    found = np.bincount(source, minlength=len(sizes))
    assert np.all(np.abs(found - count * mixture.shares) <= 1 + len(sizes)), "uneven within a stretch"
    for s, size in enumerate(sizes):
        draws = epoch[source == s] * size + place[source == s]
        assert np.array_equal(draws, np.arange(len(draws)) + (draws[0] if len(draws) else 0)), "a row is left out"


def test_one_source_keeps_the_order_it_always_had(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """One source keeps its order, so that runs resumed from older checkpoints see the same prompts."""
    data = prompts(tokenizer, SourceConfig(path=write(tmp_path / "rows.jsonl", ROWS)))
    for step in range(5):
        order = [
            int(np.random.default_rng([9, place // 5]).permutation(5)[place % 5])
            for place in range(3 * step, 3 * step + 3)
        ]
        assert [p.index for p in data.prompts_for_step(step, 3, seed=9)] == order


def test_a_directory_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(Unreadable, match=f"^{tmp_path} has the splits a, b: choose one with split$"):
        read_columns(SourceConfig(path=str(tmp_path)))
    with pytest.raises(Unreadable, match=f"^{tmp_path} has no split 'c'; it has a, b$"):
        read_columns(SourceConfig(path=str(tmp_path), split="c"))


@pytest.mark.parametrize("source", ["verifiers:json", "reasoning_gym:chain_sum?size=3"])
def test_a_missing_package_is_installed_into_the_running_python(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by `pip install 'mrl[...]'`, which takes another pip's Python and another project's mrl."""
    monkeypatch.setattr(verifiers_environments, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    reasoning_tasks._problems.cache_clear()
    with pytest.raises(Unreadable, match=rf"{re.escape(sys.executable)} -m pip install \S*(verifiers|accelerate|mrl)"):
        read_columns(SourceConfig(path=source))


def test_a_split_that_environments_of_verifiers_lack_is_refused() -> None:
    pytest.importorskip("verifiers", reason="the package verifiers (extra verifiers) is not installed")
    assert read_columns(SourceConfig(path="verifiers:json", split="eval")) is None, "only its rows can tell"
    with pytest.raises(Unreadable, match="has no split 'test'; it has train, eval"):
        read_columns(SourceConfig(path="verifiers:json", split="test"))
    with pytest.raises(Unreadable, match="there is no module nowhere"):
        read_columns(SourceConfig(path="verifiers:nowhere"))
