"""The plan of vision-language models: the planned vision tower against the built and measured one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl import platform

platform.install()

from mrl.config.schema import ParallelConfig, TrainConfig  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.families.flops import TowerFlops  # noqa: E402
from mrl.models.vision import _tower  # noqa: E402
from mrl.plan.built_model import build  # noqa: E402
from mrl.plan.dry_run import rank_kinds  # noqa: E402
from mrl.plan.grid import Grid  # noqa: E402
from mrl.plan.parameters import chunks, model_elements  # noqa: E402
from mrl.plan.tower import saved_bytes  # noqa: E402
from tests.helpers.plan_measured import padded_as_on_gpus  # noqa: E402
from tests.helpers.tiny_vl import VL_FAMILIES, make_tiny_vl  # noqa: E402
from tests.unit.plan.test_plan import ROOT, plan_of  # noqa: E402

LAYOUTS = [({}, 2), ({"tensor": 2, "pipeline": 2}, 4), ({"pipeline": 2, "context": 2}, 4)]
SIDE = 16  # patches per side of the measured image


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vl")
    return {family: make_tiny_vl(root / family, family, weights=False) for family in VL_FAMILIES}


@pytest.fixture(autouse=True)
def _padded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    with padded_as_on_gpus():
        yield


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(("layout", "world"), LAYOUTS, ids=str)
@pytest.mark.parametrize("family", VL_FAMILIES)
def test_every_rank_holds_what_the_plan_says(
    models: dict[str, Path], family: str, layout: dict[str, int], world: int, trained: bool
) -> None:
    arch, train = load_arch(models[family]), TrainConfig(parallel=ParallelConfig(**layout))
    grid = Grid(train.parallel, world)
    for coords in grid.all_coordinates:
        built = build(arch, str(models[family]), "policy", train, coords.rank, world, torch.bfloat16, tower=trained)
        planned = chunks(arch, "policy", train.parallel, coords)
        assert [sorted(n for _, n in chunk) for chunk in built.names] == [sorted(p.numel for p in c) for c in planned]
        assert built.held == model_elements(arch, "policy", grid, coords, tower=trained), coords


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", VL_FAMILIES)
def test_what_a_trained_tower_keeps_of_a_patch(models: dict[str, Path], family: str, dtype: torch.dtype) -> None:
    vision = load_arch(models[family]).vision
    assert vision is not None
    tower, kept = _tower(str(models[family])), {}
    own = {p.data.untyped_storage().data_ptr() for p in tower.to(dtype).parameters()}
    pixels = torch.randn(SIDE * SIDE, vision.patch_values, dtype=dtype)

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = tower(pixels, grid_thw=torch.tensor([[1, SIDE, SIDE]]), return_dict=True)
    assert out.pooler_output.requires_grad
    measured = sum(size for pointer, size in kept.items() if pointer not in own) - pixels.nbytes
    assert saved_bytes(vision, SIDE * SIDE, dtype.itemsize) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("name", ["grpo_qwen25vl_7b_8gpu", "ppo_qwen3vl_8b_16gpu"])
def test_the_recipes_ranks_are_built_as_they_are_planned(name: str) -> None:
    plan = plan_of(name)
    for model in plan.work.models.values():
        assert all(kind.is_right for kind in rank_kinds(model)), model.name
    assert any(item.what == "tower" for item in dict(plan.worst)["actor_update"][1].items)
    assert any("images" in part.what for part in plan.parts if part.phase == "rollout")


def test_a_frozen_tower_costs_its_weights_alone_on_the_first_stage() -> None:
    frozen = plan_of("grpo_qwen25vl_7b_8gpu", "actor.parallel.pipeline=2")
    trained = plan_of("grpo_qwen25vl_7b_8gpu", "actor.parallel.pipeline=2", "model.vision.train=true")

    def needs(plan: object, rank: int) -> dict[str, float]:
        (phase,) = (each for each in plan.ranks[rank] if each.name == "actor_update")  # type: ignore[attr-defined]
        return {item.what: item.nbytes for item in phase.items if item.owner == "actor"}

    first, last = (needs(frozen, rank) for rank in (0, max(frozen.ranks)))
    assert "tower" in first and "tower" not in last
    more = needs(trained, 0)
    assert more["gradients"] > first["gradients"] and more["tower"] > 5 * first["tower"]


def test_the_tower_s_work_of_a_picture_is_what_its_products_take(models: dict[str, Path]) -> None:
    """The planned operations of the tower equal torch's own count, with full attention in every layer."""
    from torch.utils.flop_counter import FlopCounterMode

    arch = load_arch(models["qwen3_vl"])
    tower, counter = _tower(str(models["qwen3_vl"])), FlopCounterMode(display=False)
    assert arch.vision is not None
    tower.set_attn_implementation("eager")  # the counter does not know the fused CPU attention
    pixels = torch.randn(SIDE * SIDE, arch.vision.patch_values)
    with counter, torch.no_grad():
        tower(pixels, grid_thw=torch.tensor([[1, SIDE, SIDE]]), return_dict=True)
    counted = TowerFlops.of(arch)
    assert counted is not None
    assert counted.picture(SIDE * SIDE) == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert TowerFlops.of(load_arch(ROOT / "yaml_configs/models/Qwen2.5-7B")) is None
