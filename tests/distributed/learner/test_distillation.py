"""Loss and gradient of on-policy distillation are the same under every layout, and equal the papers' formulas."""

from __future__ import annotations

import json

import pytest

from tests.helpers.divergences import DIVERGENCES, with_one_teacher
from tests.helpers.slow import RUN_SLOW, slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

pytestmark = pytest.mark.long

WORLDS = {
    1: ("one",),
    2: slow_cases("tp2", "pp2", "cp2", "dp2"),
    4: ("tp2.pp2", "cp2.dp2", *slow_cases("tp2.cp2", "pp2.vpp2")),
}
CASES = {*(f"{kind} {mix} 2" for kind, mix in DIVERGENCES), "several", "sampled"}
CASES |= {*(f"top {kind} {mix} 1" for kind, mix in DIVERGENCES[:3]), "top several", "top sampled"}
Results = dict[str, dict[str, tuple[float, float, str]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Returns results by layout and case for a student and two teachers: one of its size, and one of another family and
    width with additional, unused ids."""
    folder, found = tmp_path_factory.mktemp("distillation"), Results()
    size = {"vocab_size": 313, "num_hidden_layers": 4 if RUN_SLOW else 2}  # virtual pipeline stages need four
    make_tiny(folder / "student", "qwen2", tied=True, num_key_value_heads=4, **size)
    make_tiny(folder / "small", "qwen2", tied=True, seed=1, **size)
    make_tiny(folder / "large", "llama", tied=False, seed=2, hidden_size=96, **size | {"vocab_size": 640})
    for processes, layouts in WORLDS.items():
        if not layouts:
            continue
        run_world(processes, "distillation.py", folder, folder / "result.json", *layouts)
        found |= json.loads((folder / "result.json").read_text())
    return found


def test_no_layout_is_left_out(results: Results) -> None:
    assert set(results) == {layout for layouts in WORLDS.values() for layout in layouts}


@pytest.mark.parametrize(
    ("processes", "layout"), [(processes, layout) for processes, layouts in WORLDS.items() for layout in layouts]
)
def test_loss_and_gradients_equal_the_formula_in_float64(results: Results, processes: int, layout: str) -> None:
    assert set(results[layout]) == CASES | {f"{kind} {mix} 1" for kind, mix in with_one_teacher(processes)}
    for case, (loss_error, gradient_error, worst) in results[layout].items():
        assert loss_error < 1e-5 and gradient_error < 1e-5, (case, loss_error, gradient_error, worst)
