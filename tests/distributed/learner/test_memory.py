"""Models that offload their memory between the phases of a step: equal results, with less memory on the device."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mrl.trainers.rl.memory_order import ORDER
from tests.conftest import TinyModels
from tests.helpers.slow import slow_cases
from tests.helpers.world import run_world

pytestmark = pytest.mark.long

PPO, GRPO, EXPERTS = "PPO, TP2 x PP2, float32", "GRPO, TP2 x DP2, bfloat16", "PPO, experts, bfloat16"
CASES = (PPO, GRPO, *slow_cases(EXPERTS))
GIVEN_UP = [(PPO, "optimizer"), (PPO, "all"), (GRPO, "all"), *slow_cases((GRPO, "optimizer"), (EXPERTS, "all"))]
SHAPE: dict[str, Any] = {
    "weights": False,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_key_value_heads": 4,
    "vocab_size": 321,
}


@pytest.fixture(scope="module")
def world(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the reports of a world of 4 processes, by case."""
    dense = tiny_models("llama", tied=True, num_hidden_layers=4, **SHAPE)
    moe = tiny_models("qwen3_moe", moe_intermediate_size=32, **(SHAPE | {"head_dim": 16}))
    output = run_world(4, "memory.py", tmp_path_factory.mktemp("memory"), dense, moe)
    return {case.pop("case"): case for case in map(json.loads, output.splitlines())}


@pytest.mark.parametrize(("case", "offload"), GIVEN_UP)
def test_weights_adam_and_metrics_are_the_same_to_the_bit(world: dict[str, Any], case: str, offload: str) -> None:
    found = world[f"{case}, {offload}"]
    assert found["metrics"] and found["bits"]


@pytest.mark.parametrize("case", [PPO, *slow_cases(GRPO, EXPERTS)])
@pytest.mark.parametrize("change", ["none to all", "all to none"])
def test_a_checkpoint_goes_on_with_another_offload_to_the_bit(world: dict[str, Any], case: str, change: str) -> None:
    found = world[f"{case}, {change}"]
    assert found["metrics"] and found["bits"]
    assert (sum(found["held"].values()) == 0) == (change == "none to all"), "what was loaded was not given up again"


@pytest.mark.parametrize(("case", "offload"), GIVEN_UP)
def test_what_is_on_the_device_in_each_phase_is_what_the_table_says(
    world: dict[str, Any], case: str, offload: str
) -> None:
    found = world[f"{case}, {offload}"]
    assert set(found["seen"]) >= {"rollout", "scoring", "experience", "actor_update", "sync"}
    for phase, seen in found["seen"].items():
        for model, held in seen.items():
            parts, level = found["parts"][model], ORDER[phase].models[model]
            of_models_not_trained = model in ("ref", "reward") and offload == "optimizer"  # models without an optimizer
            if level == "all":
                want = sum(parts.values())
            elif level == "parameters" or offload == "optimizer" or of_models_not_trained:
                want = parts["parameters"]
            else:
                want = 0
            assert held == want, (phase, model)


@pytest.mark.parametrize("case", CASES)
def test_nothing_else_of_the_models_is_left(world: dict[str, Any], case: str) -> None:
    """After an offload no copy of weights, gradients or moments remains besides those that are counted."""
    found = world[f"{case}, all"]
    assert found["beyond"]["rollout"] < 0.5 * found["parts"]["actor"]["parameters"]


def test_the_parts_are_those_of_the_layout(world: dict[str, Any]) -> None:
    """The bytes of each part follow from the layout. float32 weights are their own main weights, and their padding has
    no moments; each of two data-parallel ranks holds half of main weights and moments."""
    of_float32, of_bfloat16 = (world[f"{case}, all"]["parts"]["actor"] for case in (PPO, GRPO))
    assert of_float32["gradients"] == of_float32["parameters"]
    assert 1.9 < of_float32["optimizer"] / of_float32["parameters"] <= 2
    assert of_bfloat16["gradients"] == 2 * of_bfloat16["parameters"]
    assert 2.9 < of_bfloat16["optimizer"] / of_bfloat16["parameters"] <= 3


def test_what_was_moved_is_in_the_metrics(world: dict[str, Any]) -> None:
    stays = world[f"{PPO}, none"]["moved"]
    assert {"memory/resident_gib/rollout", "memory/resident_gib/actor_update"} < stays.keys(), "what each phase held"
    assert all(name.startswith("memory/resident_gib/") and gib > 0 for name, gib in stays.items())
    some, most = (world[f"{PPO}, {offload}"]["moved"] for offload in ("optimizer", "all"))
    assert 0 < some["memory/offloaded_gib"] < most["memory/offloaded_gib"]
    assert 0 < some["memory/offload_s"]


def test_what_is_away_is_refused_by_name(world: dict[str, Any]) -> None:
    found = world["refusals"]
    away = "gradients, main weights and Adam's moments and parameters are not on the device"
    assert "computing log_probs: the policy's parameters are not on the device" in found["log_probs"]
    assert f"a backward pass: the policy's {away}" in found["update"] and "offload: all" in found["update"]
    assert f"an update: the policy's {away}" in found["step"]
    assert "embedding.word_embeddings.weight cannot be exported" in found["export"]
    assert "swapping weights: the policy's parameters" in found["average"]
    assert "the policy's gradients, main weights and Adam's moments are not" in found["update without the optimizer"]


def test_a_rank_that_cannot_move_is_one_error_that_names_it_and_the_phase(world: dict[str, Any]) -> None:
    said = world["refusals"]["no host memory"]
    want = "offloading before 'critic_update' failed: rank 2: actor: RuntimeError: out of host memory"
    assert said == f"OffloadError: {want}"
