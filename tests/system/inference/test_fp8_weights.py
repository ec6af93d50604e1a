"""Weights held in fp8, with a stub of transformer-engine's tensors (fake_fp8.py) registered in Megatron: float32 main
weights, updates, verified syncs to an engine, checkpoints, and resuming."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mrl.config.schema import RolloutConfig
from mrl.inference.start import start_engine
from tests.distributed.models.test_fp8_layers import SIZES
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.world import run_world

LAYOUTS = ("tp2", *slow_cases("dp2"))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("fp8_weights")
    model, result = make_tiny(root / "model", "llama", **SIZES), root / "result.json"
    with start_engine(RolloutConfig(engine="transformers"), str(model), "bfloat16", root) as engine:
        engine.wait_ready()
        (root / "engine.json").write_text(json.dumps({"url": engine.urls[0], "api_key": engine.pool.access.api_key}))
        run_world(2, "fp8_weights.py", root, model, root / "engine.json", result, *LAYOUTS)
    found: dict[str, dict[str, Any]] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_main_weights_are_what_was_loaded_and_the_model_s_are_rounded(
    results: dict[str, dict[str, Any]], layout: str
) -> None:
    found = results[layout]
    assert found["drawn"] and found["mains"]
    assert len(found["rounding"]) == 2 * 7 and all("_proj" in name for name in found["rounding"])
    assert all(0.02 < error < 0.04 for error in found["rounding"].values()), found["rounding"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_push_is_verified_and_brings_what_the_model_computes_with(
    results: dict[str, dict[str, Any]], layout: str
) -> None:
    first, updated, of_the_checkpoint = results[layout]["hashes"]
    assert len(first) == len(updated) > 0 and all(map(str.__ne__, first, updated))
    assert of_the_checkpoint == updated


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_has_them_as_others_read_them_and_a_resumed_run_is_the_same_to_the_bit(
    results: dict[str, dict[str, Any]], layout: str
) -> None:
    found = results[layout]
    assert found["saved"] and found["loaded"] and found["resumed"]
