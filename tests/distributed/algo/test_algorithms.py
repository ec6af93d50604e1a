"""Every estimator and policy loss: training under another layout ends with the weights of one process."""

from __future__ import annotations

import json

import pytest

from mrl.options.estimators import ESTIMATORS
from mrl.options.losses import POLICY_LOSSES
from tests.helpers.slow import RUN_SLOW
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

pytestmark = pytest.mark.long

RECIPES = (
    "dapo", "dr_grpo", "kl_cov from the old policy on", "high entropy tokens", "truncated importance weights",
    "rejected responses", "off-policy sequence mask", "bias-corrected KL", "resampled, whitened in scale only",
    "token baseline of weighted samples", "gspo by tokens", "geo_mean with weights of tokens",
)  # fmt: skip
OWN = "function"  # a user's own function: tests/distributed/algo/test_extending_algorithms.py
NAMES = (*(name for name in ESTIMATORS if name != OWN), *(f"loss {mode}" for mode in POLICY_LOSSES if mode != OWN))
ALGORITHMS = (*NAMES, *RECIPES)
PROCESSES, LAYOUT = (4, "tp2.pp2") if RUN_SLOW else (2, "cp2")  # cp2 splits samples, over which some losses sum
Results = dict[str, tuple[float, str, float, bool]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("algorithms")
    # llama: Adam turns the near-zero gradients of key biases into noise as large as the learning rate
    model = make_tiny(root / "llama", "llama", tied=True, weights=False, vocab_size=313)
    for processes, layout in ((1, "one"), (PROCESSES, LAYOUT)):
        run_world(processes, "algorithms.py", model, root / "reference.pt", root / "result.json", layout)
    return json.loads((root / "result.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_steps_do_not_depend_on_the_layout(results: Results, algorithm: str) -> None:
    error, worst, change, is_plain = results[algorithm]
    assert change > 1e-3, "the updates are too small to show anything"
    assert error < 1e-5, (error, worst)
    assert is_plain == (algorithm == "loss vanilla"), "the algorithm's own part was not at work"


def test_no_algorithm_is_left_out(results: Results) -> None:
    assert set(results) == set(ALGORITHMS)
