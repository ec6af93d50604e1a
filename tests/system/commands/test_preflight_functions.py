"""`mrl preflight` runs the reward function in a separate process: the mistakes that this finds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModels
from tests.helpers.bad_runs import MISTAKES_OF_FUNCTIONS, SCORE, Mistake, scores
from tests.helpers.preflight_run import assert_named, preflight_run


@pytest.fixture
def run(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    return preflight_run(tiny_models("qwen2"), tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("mistake", MISTAKES_OF_FUNCTIONS, ids=lambda mistake: mistake.id)
def test_a_function_s_mistake_is_named(mistake: Mistake, run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    assert_named(mistake, *run(mistake))


def test_with_errors_that_score_zero_a_failing_function_is_a_warning(run: Callable[..., tuple[int, Any]]) -> None:
    code, said = run(Mistake("zero", (), (SCORE, "reward.on_error=zero"), scores("return 1 / 0")))
    assert code == 0 and [f["verdict"] for f in said["findings"] if f["check"] == "reward"] == ["warning"]
