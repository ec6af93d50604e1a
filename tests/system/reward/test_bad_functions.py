"""Unusable reward functions are refused in one line and in bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.workers import pool
from tests.conftest import TinyModels
from tests.helpers.bad_inputs import FUNCTIONS, BadInput
from tests.helpers.refused import refusal, write_run


@pytest.fixture
def model(tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tiny_models("llama")


@pytest.mark.parametrize("bad", FUNCTIONS, ids=lambda bad: bad.id)
def test_a_function_that_no_run_can_call(model: Path, bad: BadInput, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(model, function="reward.py:score")
    Path("reward.py").write_bytes(bad.contents)
    line = refusal(capsys, "train", "c.yaml", code=1)
    assert "reward.py:score" in line and all(part in line for part in bad.says), line


def test_an_import_that_hangs_is_waited_for_in_bounds(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STARTUP_TIMEOUT_S", 0.5)
    write_run(model, function="reward.py:score")
    Path("reward.py").write_text("import time\ntime.sleep(600)\ndef score(prompt, response, row): return 0.0\n")
    line = refusal(capsys, "train", "c.yaml", code=1)
    assert "reward.py:score" in line and "takes too long or hangs" in line
