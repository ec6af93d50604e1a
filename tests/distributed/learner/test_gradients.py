"""The signature test: loss, every gradient and whole training runs do not depend on the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

pytestmark = pytest.mark.longest

DENSE_ON_4 = (
    "tp2", "tp4", "pp2", "cp2", "cp4", "dp4/overlap", "tp2.pp2", "tp2.cp2", "pp2.dp2/overlap", "tp2.sequence0",
    "tp2.pp2/full", "cp2/selective",
)  # fmt: skip
DEEP_ON_4 = ("pp4", "pp2.vpp2", "pp2.first1", "pp2.vpp2/overlap")  # of four layers, the others of two
TEN_STEPS = "ten:tp2.pp2,cp2.dp2/overlap"
DENSE_ON_8 = ("tp2.pp2.cp2",)
MOE_ON_4 = ("ep2/overlap", "ep4", "tp2.ep2", "tp2", "tp2.ep2.etp2", "pp2.ep2", "cp2.ep2/full")
CASES = ("ppo", "grpo", "gspo", "geo_mean", "critic", "trajectories", "several")
Results = dict[str, dict[str, tuple[float, float, str]]]


def world(processes: int, model: Path, reference: Path, result: Path, *layouts: str) -> Results:
    run_world(processes, "gradients.py", model, reference, result, *layouts)
    return json.loads(result.read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("gradients")
    size = {"num_key_value_heads": 4, "vocab_size": 313}
    kinds: dict[str, tuple[str, int, bool, dict[int, tuple[str, ...]]]] = {
        "dense": ("qwen2", 2, True, {4: DENSE_ON_4, 8: DENSE_ON_8}),
        "deep": ("qwen2", 4, True, {4: DEEP_ON_4}),
        "moe": ("qwen3_moe", 2, False, {4: MOE_ON_4}),
    }
    out: Results = {}
    for name, (family, layers, tied, worlds) in kinds.items():
        model = make_tiny(root / name, family, tied=tied, weights=False, num_hidden_layers=layers, **size)
        reference = root / f"{name}.pt"
        world(1, model, reference, root / "one.json", "one")
        for processes, layouts in worlds.items():
            got = world(processes, model, reference, root / f"{name}_{processes}.json", *layouts)
            out |= {f"{name}:{layout}": result for layout, result in got.items()}
    # llama: Adam turns the near-zero gradients of key biases into noise of the size of the learning rate
    llama = make_tiny(root / "llama", "llama", tied=True, weights=False, vocab_size=313)
    return out | world(4, llama, root / "dense.pt", root / "ten.json", TEN_STEPS)


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
    _, error, worst = results[TEN_STEPS]["weights"]
    assert 0 < error < 1e-5, (error, worst)
