"""The recipe of docs/extending.md for a model family: a class and a line. Also a family with unlike layers."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.families import FAMILIES, LayerArch, UnsupportedModel, load_arch
from mrl.families.table import weight_table
from tests.distributed.weights.test_weights_worlds import check_parity, write_reference
from tests.helpers.tiny import make_tiny
from tests.helpers.toy_families import TOYS, Toy
from tests.helpers.world import run_world

WEIGHTS = "model.safetensors"
TP2 = {"tensor": 2}
LAYOUTS = {"toy": [{}, TP2], "every second": [{}, {"pipeline": 2}, {"expert": 2}, {**TP2, "expert": 2}]}
CHECKS = ("round_trip", "logits", "attributes")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    settings: dict[str, Any] = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "intermediate_size": 96}
    made = {"toy": make_tiny(root / "toy", "llama"), "every second": make_tiny(root / "two", "qwen3_moe", **settings)}
    for path in made.values():
        write_reference(path, fused=False)
    make_toy(made["toy"])
    return made


def make_toy(llama: Path) -> None:
    """Renames the model to the toy family; the weights stay the same."""
    config = json.loads((llama / "config.json").read_text())
    config |= {"architectures": ["ToyForCausalLM"], "model_type": "toy", "ffn_dim": config.pop("intermediate_size")}
    (llama / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def world(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns results by "check model layout"."""
    out = tmp_path_factory.mktemp("world")
    jobs = {
        f"{check} {name} {layout}": {"check": check, "model": str(models[name]), "layout": layout}
        for name, layouts in LAYOUTS.items()
        for layout in layouts
        for check in CHECKS
    }
    jobs["save toy"] = {"check": "save", "model": str(models["toy"]), "layout": TP2, "out": str(out / "saved")}
    for name in LAYOUTS:
        spec = {"check": "convert", "model": str(models[name]), "layout": {}, "out": str(out / name)}
        jobs[f"convert {name}"] = spec
    (out / "jobs.json").write_text(json.dumps(list(jobs.values())))
    run_world(2, "toy_families.py", out / "jobs.json", out / "results.json")
    return {**dict(zip(jobs, json.loads((out / "results.json").read_text()), strict=True)), "saved": out / "saved"}


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, family in TOYS.items():
        monkeypatch.setitem(FAMILIES, name, family)
    weight_table.cache_clear()
    yield
    weight_table.cache_clear()


def test_the_page_shows_this_family() -> None:
    assert inspect.getsource(Toy) in (Path(__file__).parents[3] / "docs" / "extending.md").read_text()


def test_an_unknown_family_is_refused_and_a_line_makes_it_known(models: dict[str, Path], toys: None) -> None:
    arch = load_arch(models["toy"])
    assert (arch.family, arch.dense_width, arch.num_layers) == ("toy", 128, 2)
    assert {hf for row in weight_table(arch).values() for hf in row.hf} == set(load_file(models["toy"] / WEIGHTS))
    del FAMILIES["toy"]
    with pytest.raises(UnsupportedModel, match="ToyForCausalLM is not supported; supported: DeepseekV3F"):
        load_arch(models["toy"])


def test_what_a_plain_decoder_refuses_the_new_family_refuses(
    models: dict[str, Path], toys: None, tmp_path: Path
) -> None:
    config = json.loads((models["toy"] / "config.json").read_text())
    for key, value, says in (("ffn_dim", 0, "ffn_dim must be"), ("mlp_bias", True, "not supported for toy: mlp_bias")):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(UnsupportedModel, match=says):
            load_arch(tmp_path)


@pytest.mark.parametrize(("model", "layout"), [(name, layout) for name in LAYOUTS for layout in LAYOUTS[name]])
def test_its_weights_come_back_and_its_logits_are_transformers(
    world: dict[str, Any], model: str, layout: dict[str, int]
) -> None:
    assert world[f"round_trip {model} {layout}"] == []
    assert world[f"attributes {model} {layout}"] == []
    check_parity(world[f"logits {model} {layout}"])


def test_what_is_saved_is_the_same_directory(models: dict[str, Path], world: dict[str, Any]) -> None:
    before = load_file(models["toy"] / WEIGHTS)
    after: dict[str, torch.Tensor] = {}
    for file in world["saved"].glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((world["saved"] / "config.json").read_text())["architectures"] == ["ToyForCausalLM"]


def test_layers_may_differ(models: dict[str, Path], toys: None) -> None:
    arch = load_arch(models["every second"])
    assert arch.layers == (LayerArch(96), LayerArch(64, experts=True)) * 2
    assert (arch.dense_width, arch.expert_width, arch.layers_differ) == (96, 64, True)
    routers = [name for name in weight_table(arch) if "router" in name]
    assert routers == [f"decoder.layers.{i}.mlp.router.weight" for i in (1, 3)]


@pytest.mark.parametrize("model", LAYOUTS)
def test_a_conversion_keeps_every_bit(world: dict[str, Any], model: str) -> None:
    assert world[f"convert {model}"] == []
