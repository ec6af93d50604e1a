"""Emulated fp8 layers: gradients under every kind of parallelism, and the state of delayed scaling across a resume.

Blocks that are whole on one rank are rounded the same under every layout. So are scales of earlier updates, which are
reduced over all ranks; only the order of float32 sums differs. One scale per tensor differs if ranks hold parts of the
tensor: then gradients differ by no more than the recipe's own error against float32.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mrl.kernels.fp8 import Recipe
from mrl.models.fp8_layers import RoundedColumnParallel
from mrl.models.precision import STATE, FP8Emulation
from mrl.weights.disk.fp8_state import restorable_state
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

# blocks of 128 are whole on two ranks
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "initializer_range": 0.05,
}
ON_2 = ("tp2", "moe:ep2", *slow_cases("pp2", "cp2"))
RECIPES = ("current", "delayed", "blockwise", "mxfp8", "blockwise with head")
SAME = {("pp2", name) for name in RECIPES}
SAME |= {(layout, name) for layout in ON_2 for name in RECIPES if name.startswith(("blockwise", "mxfp8"))}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("fp8")
    dense = make_tiny(root / "dense", "llama", weights=False, **SIZES)
    moe = make_tiny(root / "moe", "qwen3_moe", weights=False, **SIZES, moe_intermediate_size=256)
    found = {}
    alone, cut = slow_cases("resume:one"), ("resume:tp2", *slow_cases("resume:dp2"))
    for processes, layouts in ((1, ("one", "moe:one", *alone)), (2, (*ON_2, *cut))):
        file = root / f"{processes}.json"
        run_world(processes, "fp8.py", root, dense, moe, file, *layouts)
        found |= json.loads(file.read_text())
    return found


@pytest.mark.parametrize("layout", ON_2)
def test_gradients_equal_one_process_where_blocks_do_and_are_near_elsewhere(
    results: dict[str, dict[str, Any]], layout: str
) -> None:
    own = results["moe:one" if layout.startswith("moe:") else "one"]
    for name in ("none", *RECIPES):
        loss_error, gradient_error, _ = results[layout][name]
        if name == "none" or (layout, name) in SAME:
            # a tenth of the rounding error: values at the edge of a rounding interval depend on the order of sums
            bound = 1e-5 if name == "none" else 0.1 * own[name][1]
            assert loss_error < 1e-5 and gradient_error < bound, (name, loss_error, gradient_error)
        elif (layout, name) == ("tp2", "delayed"):  # such values of the first update change the scales of the next
            assert gradient_error < 0.5 * own[name][1] and loss_error < 0.01, (name, loss_error, gradient_error)
        else:
            assert 1e-5 < gradient_error < 1.5 * own[name][1], (name, gradient_error, own[name])
            assert loss_error < 0.01, (name, loss_error)


def test_rounding_is_at_work_and_small(results: dict[str, dict[str, Any]]) -> None:
    for model, least, most in (("one", 0.08, 0.18), ("moe:one", 0.15, 0.3)):
        for name in RECIPES:
            assert least < results[model][name][1] < most, (model, name, results[model][name])
        assert results[model]["blockwise"][1] < results[model]["current"][1]


@pytest.mark.parametrize("layout", ["tp2", *slow_cases("one", "dp2")])
def test_a_resumed_run_is_the_same_to_the_bit_with_all_that_scaling_remembers(
    results: dict[str, dict[str, Any]], layout: str
) -> None:
    found = results[f"resume:{layout}"]
    assert found["delayed"]["weights"] == found["blockwise"]["weights"] == 0.0
    assert found["delayed"]["passes"], "a pass without gradients has moved what scales will be made of"
    assert found["delayed"]["memory"] and found["delayed"]["scales"] == 24, (
        "8 layers with 3 scales each, all of them set"
    )


@pytest.mark.parametrize("layout", ["one", "moe:one", *ON_2])
def test_the_head_s_error_is_reported_and_the_same_under_every_layout(
    results: dict[str, dict[str, Any]], layout: str
) -> None:
    head = results[layout]["head"]
    assert head["reported"] == pytest.approx(head["by two models"], rel=1e-3) and head["without"] == {}
    assert 0.005 < head["reported"][0] < head["reported"][1] < 0.3
    alone = results["moe:one" if layout.startswith("moe:") else "one"]["head"]["reported"]
    assert head["reported"] == pytest.approx(alone, rel=1e-3)


def test_the_memory_of_other_layers_is_refused() -> None:
    emulation = FP8Emulation(Recipe("delayed", hybrid=True), ends=0, history=2, history_use="max", margin=0)
    layer = RoundedColumnParallel.__new__(RoundedColumnParallel)
    torch.nn.Module.__init__(layer)
    layer.rounds(emulation)
    assert layer.scales is not None
    layer.scales.roll(torch.tensor([1.0, 2.0, 3.0]))
    state = layer.get_extra_state()
    assert state is not None and bytes(state[: len(STATE)].tolist()) == STATE
    kept = restorable_state([state], "layer._extra_state")
    before = layer.scales.state()
    layer.scales.roll(torch.tensor([7.0, 7.0, 7.0]))
    layer.set_extra_state(kept)
    assert torch.equal(layer.scales.state(), before)
    layer.set_extra_state(None)
    with pytest.raises(ValueError, match="transformer-engine's"):
        layer.set_extra_state(torch.full((20,), 0x80, dtype=torch.uint8))
    with pytest.raises(ValueError, match="9 numbers, expected 12"):
        layer.set_extra_state(state[: len(STATE) + 9 * 4])


def test_the_ends_of_a_model_stay_as_they_are() -> None:
    emulation = FP8Emulation(Recipe("current", hybrid=True), ends=1, history=1, history_use="max", margin=0)
    assert [emulation.rounds(i, 4) for i in range(4)] == [False, True, True, False]
