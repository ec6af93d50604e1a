"""Copies of a policy's weights: moving averages and refreshed references, saved and restored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.conftest import TinyModels
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

pytestmark = pytest.mark.long

AVERAGES = ("TP2 x PP2", "DP4, bfloat16", *slow_cases("EP2 x DP2"))
SAVED = ("dense tp2.pp2", *slow_cases("moe ep2", "bfloat16 dp4"))
LOADED_ELSEWHERE = ("dense dp4", *slow_cases("moe tp2.ep2"))
TWO_LOSSES = ("two losses cp2.dp2", *slow_cases("two losses tp2.pp2", "two losses pp2.vpp2"))
SHAPE: dict[str, Any] = {
    "weights": False,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_key_value_heads": 4,
    "vocab_size": 321,  # padded to different sizes at TP1 and TP2
}


def reward_models(folder: Path) -> tuple[Path, Path]:
    """Makes a complete reward model, and one that lacks the score head that its configuration names."""
    names = ("reward", "headless")
    for name in names:
        config = AutoConfig.from_pretrained(make_tiny(folder / name, "qwen2", weights=False))
        config.num_labels = 1
        torch.manual_seed(3)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / name)
    file = folder / names[1] / "model.safetensors"
    weights = load_file(file)
    del weights["score.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    return folder / names[0], folder / names[1]


@pytest.fixture(scope="module")
def world(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the reports of a world of 4 processes, by case."""
    work = tmp_path_factory.mktemp("copies")
    dense = tiny_models("llama", tied=True, num_hidden_layers=4, **SHAPE)
    moe = tiny_models("qwen3_moe", moe_intermediate_size=32, **(SHAPE | {"head_dim": 16}))
    output = run_world(4, "policy_copies.py", work, dense, moe, *reward_models(work))
    return {case.pop("case"): case for case in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("case", AVERAGES)
def test_the_average_is_the_recursion_in_double_precision(world: dict[str, Any], case: str) -> None:
    assert world[case]["average"] < 1e-6
    assert world[case]["apart"] > 1e-2, "the average is the policy itself"
    assert world[case]["offloaded"] == 0.0


@pytest.mark.parametrize("case", AVERAGES)
def test_a_policy_that_lent_its_place_to_its_average_trains_as_if_it_had_not(world: dict[str, Any], case: str) -> None:
    assert world[case]["learner"] == 0.0


def test_data_parallel_ranks_keep_one_average_between_them(world: dict[str, Any]) -> None:
    parts = world["parts"]
    assert sum(parts["kept"]) == parts["whole"] and max(parts["kept"]) < 0.3 * parts["whole"]


def test_a_refreshed_reference_gives_the_log_probs_of_the_policy_as_it_was(world: dict[str, Any]) -> None:
    assert world["refresh"]["stays"] and world["refresh"]["refreshed"]
    assert world["refresh"]["learner_is_elsewhere"] > 0.1


def test_a_run_has_the_reference_and_the_average_that_its_configuration_says(world: dict[str, Any]) -> None:
    found = world["wiring"]
    assert found["ema"] == {"saved": ["actor", "ema"], "is average": True, "is the actor of step": []}
    assert found["refreshed"] == {"saved": ["actor", "ema", "ref"], "is average": False, "is the actor of step": [2]}
    assert found["frozen"] == {"saved": ["actor", "ema"], "is average": False, "is the actor of step": [0]}


def test_a_critic_starts_with_the_values_of_a_reward_model(world: dict[str, Any]) -> None:
    found = world["reward model"]
    assert found["gap"] < 1e-4 * found["largest"]
    assert "names a reward model, but its weights have no score.weight" in found["headless"]


@pytest.mark.parametrize("case", TWO_LOSSES)
def test_an_update_of_two_losses_has_the_sum_of_their_gradients(world: dict[str, Any], case: str) -> None:
    found = world[case]
    assert found["gradients"] < 1e-6 < 1e-2 < found["apart"]
    assert found["metrics"] < 1e-6 and found["coefficient"] == pytest.approx(0.5)
    assert found["seen"], "the outputs of the first loss are what the rollout's own tokens are asked for"


@pytest.mark.parametrize("case", [*SAVED, *LOADED_ELSEWHERE])
def test_a_copy_comes_back_from_a_checkpoint_to_the_bit(world: dict[str, Any], case: str) -> None:
    found = world[case]
    assert found["before"] > 0.1, "the weights were the saved ones before the load"
    assert found["loaded"] == 0.0 and set(found["stored"].values()) == {0.0}
    assert found["kept"] == [0, 1, 2]


@pytest.mark.parametrize("case", [*SAVED, *LOADED_ELSEWHERE])
def test_a_copy_goes_on_as_if_never_stopped(world: dict[str, Any], case: str) -> None:
    assert world[case]["continued"] <= (0.0 if case in SAVED else 1e-6)
