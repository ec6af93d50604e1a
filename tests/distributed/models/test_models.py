"""Models are equal under every layout; attention, rope and initialization are tested separately."""

from __future__ import annotations

import json

import pytest

from tests.helpers.slow import RUN_SLOW
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Runs all checks that need several processes in one world of four."""
    root = tmp_path_factory.mktemp("models")
    dense = make_tiny(root / "dense", "qwen2", tied=True, weights=False, num_hidden_layers=4, vocab_size=323)
    moe = make_tiny(root / "moe", "qwen3_moe", weights=False, vocab_size=323)
    result = root / "result.json"
    run_world(4, "models.py", dense, moe, result)
    return json.loads(result.read_text())


@pytest.mark.parametrize("check", ["dense", "moe"])
def test_log_probs_do_not_depend_on_the_layout(world: dict[str, dict[str, float]], check: str) -> None:
    assert len(world[check]) >= (4 if RUN_SLOW else 2)
    assert max(world[check].values()) < 5e-5, world[check]


def test_critic_starts_at_zero_and_does_not_depend_on_the_layout(world: dict[str, dict[str, float]]) -> None:
    errors = dict(world["critic"])
    assert errors.pop("zero at first") == 0.0
    scale = errors.pop("scale")
    assert scale > 1.0 and max(errors.values()) < 1e-5 * scale, errors


def test_log_probs_are_those_of_the_logits_and_packing_changes_nothing(world: dict[str, dict[str, float]]) -> None:
    assert max(world["logits"].values()) < 5e-5, world["logits"]


def test_large_logits_cost_no_digits_under_tensor_parallelism(world: dict[str, dict[str, float]]) -> None:
    found = world["large logits"]
    assert found["log-probs"] < 1e-6 and found["entropies"] < 2e-6, found
    assert found["highest"] <= 0


def test_recomputation_gives_the_same_gradients(world: dict[str, dict[str, float]]) -> None:
    assert len(world["recompute"]) == (6 if RUN_SLOW else 4)
    assert max(world["recompute"].values()) < 1e-6, world["recompute"]


def test_tokens_that_leave_in_the_last_layer_change_nothing(world: dict[str, dict[str, float]]) -> None:
    errors = dict(world["leaving"])
    assert errors.pop("largest") > 1.0 and len(errors) == (8 if RUN_SLOW else 4)
    assert max(errors.values()) < 5e-6, errors


def test_bfloat16_is_close_to_float32(world: dict[str, dict[str, float]]) -> None:
    assert 0 < max(world["bfloat16"].values()) < 0.1, world["bfloat16"]
