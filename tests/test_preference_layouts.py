"""Losses of preference learning are of the step's whole batch: the same loss and gradient under every layout, in any
number of micro-batches, in one pass and in two."""

from __future__ import annotations

import json

import pytest

from tests.tiny import make_tiny
from tests.world import run_world

ONE = ("one", "one/100", "one/60")  # 1, 2 and 4 micro-batches; at 60 a pair is longer than one
TWO = ("tp2", "pp2", "cp2/60", "dp2")
Results = dict[str, dict[str, tuple[float, float, str, int]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("preference")
    size = {"num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 313}
    model, found = make_tiny(root / "model", "qwen2", tied=True, weights=False, **size), {}
    for processes, layouts in ((1, ONE), (2, TWO)):
        result = root / f"{processes}.json"
        run_world(processes, "preference.py", model, root / "one.pt", result, *layouts)
        found |= json.loads(result.read_text())
    return found


@pytest.mark.parametrize("layout", [*ONE, *TWO])
def test_loss_and_gradients_equal_one_process(results: Results, layout: str) -> None:
    assert {"sigmoid", "sigmoid twice", "aot", "kto", "sft", "simpo", "ipo"} <= results[layout].keys()
    for case, (loss_error, gradient_error, worst, _) in results[layout].items():
        assert loss_error < 1e-5 and gradient_error < 1e-5, (case, loss_error, gradient_error, worst)


def test_the_micro_batches_were_several(results: Results) -> None:
    assert [results[layout]["sigmoid"][3] for layout in ONE] == [1, 2, 4]
