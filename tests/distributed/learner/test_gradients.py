"""Loss, every gradient and complete training runs are the same under every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

pytestmark = pytest.mark.longest

DENSE_ON_4 = (
    "tp2.pp2/full",
    "cp2/selective",
    *slow_cases("tp2", "tp4", "pp2", "cp2", "cp4", "dp4/overlap", "tp2.pp2", "tp2.cp2", "pp2.dp2/overlap"),
    *slow_cases("tp2.sequence0"),
)
DEEP_ON_4 = ("pp2.vpp2/overlap", *slow_cases("pp4", "pp2.vpp2", "pp2.first1"))  # four layers; the others have two
TEN_STEPS = "ten:tp2.pp2,cp2.dp2/overlap"
DENSE_ON_8 = slow_cases("tp2.pp2.cp2")
MOE_ON_4 = ("tp2.ep2.etp2", *slow_cases("ep2/overlap", "ep4", "tp2.ep2", "tp2", "pp2.ep2", "cp2.ep2/full"))
CASES = ("ppo", "grpo", "gspo", "geo_mean", "critic", "trajectories", "several")
Results = dict[str, dict[str, tuple[float, float, str]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("gradients")
    size = {"num_key_value_heads": 4, "vocab_size": 313}
    make_tiny(root / "dense", "qwen2", tied=True, weights=False, num_hidden_layers=2, **size)
    make_tiny(root / "deep", "qwen2", tied=True, weights=False, num_hidden_layers=4, **size)
    make_tiny(root / "moe", "qwen3_moe", tied=False, weights=False, num_hidden_layers=2, **size)
    # llama: Adam turns the near-zero gradients of key biases into noise as large as the learning rate
    make_tiny(root / "llama", "llama", tied=True, weights=False, vocab_size=313)

    out: Results = {}

    def world(processes: int, **layouts: tuple[str, ...]) -> None:
        jobs: list[str | Path] = []
        for model, some in layouts.items():
            reference = root / ("dense.pt" if model == "llama" else f"{model}.pt")  # ten steps compare two layouts
            jobs += ["--", root / model, reference, root / f"{model}.json", *some]
        run_world(processes, "gradients.py", *jobs)
        for model in layouts:
            found = json.loads((root / f"{model}.json").read_text())
            out.update({f"{model}:{layout}": result for layout, result in found.items()})

    world(1, dense=("one",), deep=("one",), moe=("one",))
    world(4, dense=DENSE_ON_4, deep=DEEP_ON_4, moe=MOE_ON_4, llama=(TEN_STEPS,))
    if DENSE_ON_8:
        world(8, dense=DENSE_ON_8)
    return out


@pytest.mark.parametrize(
    "layout",
    [f"dense:{x}" for x in (*DENSE_ON_4, *DENSE_ON_8)]
    + [f"deep:{x}" for x in DEEP_ON_4]
    + [f"moe:{x}" for x in MOE_ON_4],
)
def test_loss_and_gradients_equal_one_process(results: Results, layout: str) -> None:
    assert set(results[layout]) == set(CASES)
    for case, (loss_error, gradient_error, worst) in results[layout].items():
        assert loss_error < 1e-5 and gradient_error < 1e-5, (case, loss_error, gradient_error, worst)


def test_ten_ppo_steps_end_with_the_same_weights_under_two_layouts(results: Results) -> None:
    _, error, worst = results[f"llama:{TEN_STEPS}"]["weights"]
    assert 0 < error < 1e-5, (error, worst)
