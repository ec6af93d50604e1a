"""`mrl data` as a user runs it, and its histogram."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl import cli
from mrl.data.histogram import histogram
from tests.conftest import TinyModels

SFT = """
trainer: sft
run: {{name: run, steps: 6}}
model: {{path: {model}}}
data:
  train: [{{path: a.jsonl, weight: 3}}, {{path: b.jsonl, weight: 1, name: small}}]
  chat_template: true
  max_prompt_tokens: 40
batch: {{samples_per_step: 4}}
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(SFT.format(model=tiny_models("llama")))
    texts = {"a": ["1+1", "12+12", "x" * 99], "b": ["7"]}
    for name, prompts in texts.items():
        rows = [{"prompt": text, "answer": text[:2]} for text in prompts]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def test_mrl_data_shows_what_the_model_will_see(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "c.yaml", "--samples", "4"]) == 0
    out = capsys.readouterr().out
    assert "data.train, a.jsonl: 1 rows left out: their prompt does not fit into data.max_prompt_tokens=40" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["75.0%", "3", "1", "0", "119", "9.00", "a.jsonl"] in lines  # 24 prompts, 18 of them from 2 rows
    assert ["25.0%", "1", "0", "0", "20", "6.00", "b.jsonl"] in lines
    assert "tokens of prompt, answer and EOS: 20 to 25" in out  # "user: 7\nassistant:" is 18 bytes; "7", EOS
    assert out.count("\n--- ") == 4 and out.count("user: 7\nassistant:\n--> 2 tokens, including EOS\n7\n") == 1
    assert "--- b.jsonl:1: 20 tokens, data_source small\n" in out
    assert "user: 12+12\nassistant:\n--> 3 tokens, including EOS\n12\n" in out


def test_mrl_data_names_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "b.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": "1", "answer": 1}\n')
    assert cli.main(["data", "c.yaml"]) == 1
    said = "b.jsonl:2: 'answer' must be text or a list of messages with 'role' and 'content'\n"
    assert capsys.readouterr() == ("", said)
    assert cli.main(["data", "c.yaml", "data.truncation=start"]) == 2
    assert "data.truncation: must be one of drop, left, right" in capsys.readouterr().err


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_a_histogram_counts_every_length_once(lengths: list[int]) -> None:
    head, *bars = histogram(np.asarray(lengths), "prompt")
    assert f"{min(lengths)} to {max(lengths)}" in head and len(bars) <= 10
    for bar in bars:
        first, _, last, *hashes, count = bar.split()
        assert int(count) == sum(int(first) <= length <= int(last) for length in lengths)
        assert bool(hashes) == (int(count) > 0)
    assert sum(int(bar.split()[-1]) for bar in bars) == len(lengths)
