"""`mrl plan` with products, weights and engines in fp8."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.schema import FP8Config, ParallelConfig, PrecisionConfig, TrainConfig
from mrl.families import load_arch
from mrl.plan.built_model import build
from mrl.plan.engine import weights_per_gpu
from mrl.plan.grid import Grid
from mrl.plan.memory import PhaseMemory
from mrl.plan.parameters import matrices
from mrl.plan.plan import Plan
from mrl.weights.sync.quantized import QuantizedSource
from tests.helpers.plan_measured import Case, TinyModels, padded_as_on_gpus, saved_activations
from tests.helpers.sync_tools import FileExporter
from tests.unit.plan.test_plan import ROOT, plan_of

MODELS = ROOT / "yaml_configs" / "models"
PLAIN, ROUNDED = "ppo_llama70b_64gpu", "ppo_llama70b_64gpu_fp8"
KEPT = ("actor.offload=optimizer", "ref.offload=none")
ALL_LAYERS = ("actor.precision.fp8.first_last_bf16=0", "critic.precision.fp8.first_last_bf16=0")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def item(plan: Plan, phase: str, what: str, owner: str = "actor") -> float:
    found: PhaseMemory = next(one for one in plan.ranks[0] if one.name == phase)
    return sum(each.nbytes for each in found.items if (each.owner, each.what) == (owner, what))


def seconds(plan: Plan, phase: str, what: str) -> float:
    return sum(part.seconds for part in plan.parts if part.phase == phase and part.what.startswith(what))


@pytest.mark.parametrize(
    ("model", "layout", "world"),
    [
        ("Llama-3.1-70B", {"tensor": 8, "pipeline": 4}, 64),
        ("Qwen3-30B-A3B", {"tensor": 2, "expert": 8}, 32),
        ("Qwen3-0.6B", {"pipeline": 2, "virtual_pipeline": 2}, 6),
    ],
)
def test_the_matrices_of_every_rank_are_those_that_it_builds(model: str, layout: dict[str, Any], world: int) -> None:
    arch, parallel = load_arch(MODELS / model), ParallelConfig(**layout)
    if arch.experts is not None:  # 128 experts in each of 48 equal layers: four layers suffice
        arch = replace(arch, layers=arch.layers[:4])
    grid = Grid(parallel, world)
    for rank in (0, world - 1):
        with padded_as_on_gpus():
            built = build(
                arch, str(MODELS / model), "policy", TrainConfig(parallel=parallel), rank, world, torch.bfloat16
            )
        weights = [
            (name, numel)
            for chunk in built.names
            for name, numel in chunk
            if "linear_" in name and name.endswith("weight") and "layer_norm" not in name
        ]
        assert matrices(arch, "policy", parallel, grid.coordinates(rank).pp, 0) == sum(numel for _, numel in weights)
    assert matrices(arch, "policy", parallel, 0, 1) < matrices(arch, "policy", parallel, 0, 0)


def test_casts_are_kept_twice_beside_weights_or_instead_of_them() -> None:
    plain, casts = plan_of(PLAIN), plan_of(ROUNDED, *ALL_LAYERS)
    held = plan_of(ROUNDED, *ALL_LAYERS, "actor.precision.fp8.params=true", *KEPT)
    actor = casts.work.models["actor"]
    count = matrices(actor.arch, "policy", actor.layout, 0, 0)
    assert item(plain, "actor_update", "weights in fp8") == 0
    assert item(casts, "actor_update", "weights in fp8") == pytest.approx(2 * count, rel=1e-3)
    assert item(casts, "actor_update", "weights in fp8", "ref") == pytest.approx(count, rel=1e-3)
    assert item(casts, "actor_update", "weights") == item(plain, "actor_update", "weights")
    assert item(casts, "actor_update", "weights") - item(held, "actor_update", "weights") == 2 * count
    assert item(held, "actor_update", "weights in fp8") == item(casts, "actor_update", "weights in fp8")
    assert item(casts, "actor_update", "activations") < item(plain, "actor_update", "activations")
    assert held.seconds < casts.seconds < plain.seconds


def test_products_take_the_chip_s_fp8_rate_and_attention_does_not() -> None:
    plain, rounded = plan_of(PLAIN), plan_of(ROUNDED, *ALL_LAYERS)
    layers = [seconds(plan, "actor_update", "actor layers") for plan in (plain, rounded)]
    assert 1.4 < layers[0] / layers[1] < 1.6, "attention is a few percent of the layers"
    heads = [seconds(plan, "actor_update", "actor head") for plan in (plain, rounded)]
    assert heads[0] / heads[1] == pytest.approx(2 * 0.36 / 0.45)
    assert seconds(plan_of(ROUNDED), "actor_update", "actor layers") > layers[1], "a layer at each end in bfloat16"


def test_emulated_nothing_is_faster_and_rounding_takes_memory() -> None:
    emulated = plan_of(PLAIN, "actor.precision.fp8={recipe: blockwise, emulate: true, head: true}")
    plain = plan_of(PLAIN, "actor.layers=local")
    assert item(emulated, "actor_update", "weights in fp8") == 0
    assert item(emulated, "actor_update", "current layer") > item(plain, "actor_update", "current layer")
    parts = [part for part in emulated.parts if part.what.startswith("actor layers")]
    assert all("time of rounding not counted" in part.what for part in parts)
    assert seconds(emulated, "actor_update", "actor layers") == seconds(plain, "actor_update", "actor layers")


def test_emulated_layers_keep_what_the_plan_says(tiny_models: TinyModels) -> None:
    precision = PrecisionConfig(fp8=FP8Config(recipe="blockwise", emulate=True))
    saved, planned = saved_activations(
        Case("qwen2", 2, {"tensor": 2}), "none", torch.bfloat16, "policy", tiny_models, precision
    )
    assert planned == pytest.approx(saved, rel=0.1)


def test_an_engine_in_fp8_holds_what_is_pushed(tiny_models: TinyModels) -> None:
    for family in ("qwen2", "qwen3_moe"):
        path: Path = tiny_models(family, hidden_size=256, intermediate_size=256, moe_intermediate_size=128)
        source = QuantizedSource(FileExporter(path))
        pushed = sum(meta.nbytes for meta in source.metas())
        assert weights_per_gpu(load_arch(path), 1, 4, quantized=True) == pytest.approx(pushed, rel=0.02)
