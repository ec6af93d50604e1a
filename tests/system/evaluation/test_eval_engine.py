"""`mrl eval` up to the start of its engine, with a reward worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrl import cli
from mrl.config.derived import Machine
from mrl.inference.errors import EngineUnavailable
from tests.conftest import TinyModels
from tests.unit.evaluation.test_eval import sampling


def test_answers_are_drawn_on_the_gpus_that_are_here(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, machine: Machine) -> None:
        raise EngineUnavailable(f"nothing serves on {machine.gpus} GPUs")

    monkeypatch.setattr("mrl.evaluation.answers.gpu_count", lambda: 3)
    monkeypatch.setattr("mrl.evaluation.answers.start_engine", start)
    assert cli.main(["eval", str(sampling(tmp_path, tiny_models("llama")))]) == 1
    assert "mrl: nothing serves on 3 GPUs" in capsys.readouterr().err
