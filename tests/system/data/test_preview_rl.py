"""`mrl data` on an RL run: the reward function is loaded in a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl import cli
from tests.conftest import TinyModels
from tests.unit.data.test_bos import with_bos
from tests.unit.data.test_preview_agrees import agreed, write


def test_the_preview_and_the_trainer_say_the_same(
    tmp_path: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, _ = agreed(write(tmp_path, tiny_models("llama"), "rl"), monkeypatch, capsys)
    assert "data.validation: 2 prompts" in shown


def test_prompts_are_shown_with_their_bos(
    tmp_path: Path, tiny_models: TinyModels, capsys: pytest.CaptureFixture[str]
) -> None:
    model = with_bos(tmp_path / "model", tiny_models("llama"))
    cli.main(["data", str(write(tmp_path, model, "rl"))])
    assert "tokens\n<s>0+1?\n" in capsys.readouterr().out


def test_demonstrations_are_shown_beside_the_prompts(
    tmp_path: Path, tiny_models: TinyModels, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 20}
    ptx = {"data": data, "samples_per_update": 2, "coef": 1.0}
    config = write(tmp_path, tiny_models("llama"), "rl", ptx=ptx)
    assert cli.main(["data", str(config)]) == 0
    shown = capsys.readouterr().out
    assert "ptx.data.train: 1 prompts left out: longer than 20 tokens" in shown
    assert "\nptx.data.train: 7 prompts\n" in shown and "tokens of prompt, answer and EOS: 95 to 95" in shown
