"""Loss and gradient of on-policy distillation do not depend on the layout, and equal the papers' formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.divergences import DIVERGENCES
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

pytestmark = pytest.mark.longest

WORLDS = {1: ("one",), 2: ("tp2", "pp2", "cp2", "dp2"), 4: ("tp2.pp2", *slow_cases("tp2.cp2", "pp2.vpp2"))}
CASES = {*(f"{kind} {mix} {teachers}" for kind, mix in DIVERGENCES for teachers in (1, 2)), "several", "sampled"}
CASES |= {*(f"top {kind} {mix} 1" for kind, mix in DIVERGENCES[:3]), "top several", "top sampled"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student; a teacher of its size; one of another family and width with further, unused ids."""
    folder = tmp_path_factory.mktemp("distillation")
    make_tiny(folder / "student", "qwen2", tied=True, vocab_size=313, num_key_value_heads=4, num_hidden_layers=4)
    make_tiny(folder / "small", "qwen2", tied=True, seed=1, vocab_size=313, num_hidden_layers=4)
    make_tiny(folder / "large", "llama", tied=False, seed=2, vocab_size=640, hidden_size=96, num_hidden_layers=4)
    return folder


@pytest.mark.parametrize("processes", WORLDS)
def test_loss_and_gradients_equal_the_formula_in_float64(folder: Path, processes: int) -> None:
    result = folder / f"{processes}.json"
    run_world(processes, "distillation.py", folder, result, *WORLDS[processes])
    found = json.loads(result.read_text())
    assert set(found) == set(WORLDS[processes])
    for layout, by_case in found.items():
        assert set(by_case) == CASES
        for case, (loss_error, gradient_error, worst) in by_case.items():
            assert loss_error < 1e-5 and gradient_error < 1e-5, (layout, case, loss_error, gradient_error, worst)
