"""A checkpoint loads into every kind of layer: parameter names, and extra states of layers."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from mrl import platform
from mrl.weights.disk.fp8_state import RECIPES, restorable_state
from mrl.weights.disk.stored_names import OF_EXPERTS
from mrl.weights.errors import WeightError
from mrl.weights.model.load import ParameterLoad, _mark
from mrl.weights.parameter_layout import ParameterMapping
from tests.helpers import fake_te
from tests.helpers.python_process import run_python
from tests.helpers.world import run_world
from tests.system.commands.test_convert import mrl

SHAPE: dict[str, Any] = {"weights": False, "hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def world(tiny_models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("kinds")
    models = [
        tiny_models("llama", tied=True, num_hidden_layers=2, **SHAPE),
        tiny_models("qwen3_moe", num_hidden_layers=2, moe_intermediate_size=32, **(SHAPE | {"head_dim": 16})),
    ]
    links = []
    for name, model in zip(("dense", "moe"), models):
        links.append(work / name)
        links[-1].symlink_to(model, target_is_directory=True)
    output = run_world(1, "layer_kinds.py", work, *links)
    return {case.pop("case"): case for case in map(json.loads, output.splitlines())}


@pytest.mark.parametrize("case", ["dense plain", "dense other", "moe plain", "moe other"])
def test_a_checkpoint_fits_the_other_kind_of_layer(world: dict[str, Any], case: str) -> None:
    found = world[case]
    assert found["objects"] != found["others"], "the two kinds keep different objects beside their parameters"
    assert found["loaded"] == 0.0
    if case.startswith("moe"):
        assert found["continued"] == 0.0
    else:  # a vocabulary padded to whole tiles of a GPU gives other rounding of sums over it
        assert sorted(found["rows"]) == [320, 384]
        assert found["continued"] < 1e-6


def test_what_delayed_scaling_has_seen_comes_back(world: dict[str, Any]) -> None:
    """A resumed run has the scales of delayed scaling. New scales would change the next update."""
    assert world["dense fp8"]["loaded"] == world["dense fp8"]["continued"] == 0.0


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


def kept(value: Any) -> list[torch.Tensor]:
    return [torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)]


def test_nothing_but_scales_is_given_to_a_layer_that_unpickles_it(capsys: pytest.CaptureFixture[str]) -> None:
    scales = kept({"scale_fwd": torch.ones(3), "extra_fp8_variables": {"num_gemms": 1}})
    assert restorable_state(scales, "layer._extra_state") is scales[0]
    assert [restorable_state(x, "") for x in ([None], [torch.empty(0, dtype=torch.uint8)], None)] == [None] * 3
    inner = io.BytesIO()
    torch.save(Evil(), inner)
    from_bytes = b"ctorch.storage\n_load_from_bytes\n(" + pickle.dumps(inner.getvalue(), 0)[:-1] + b"tR."
    by_a_module = b"c" + RECIPES.encode() + b"\nos.system\n."
    for evil in (
        kept(Evil()),
        *([torch.frombuffer(bytearray(x), dtype=torch.uint8)] for x in (from_bytes, by_a_module)),
    ):
        with pytest.raises(WeightError, match="layer._extra_state is not the fp8 state of a layer"):
            restorable_state(evil, "layer._extra_state")
    assert "run" not in capsys.readouterr().out


# parameter names of Megatron's two layer specs, with a package that imitates transformer-engine
SPECS = """
from types import SimpleNamespace
from mrl.families import FAMILIES, LayerArch
from mrl.models import specs
config = SimpleNamespace(num_moe_experts=4, moe_grouped_gemm=True, qk_layernorm=True, multi_latent_attention=False)
layer = LayerArch(8, experts=True)
kinds = [specs._local_layer(FAMILIES["qwen3_moe"], config, layer), specs._transformer_engine_layer(config, layer)]
print([kind.submodules.sharded_state_dict_keys_map.get("pre_mlp_layernorm.") for kind in kinds])
print([kind.module.__name__ for kind in kinds], specs._transformer_engine_norm().__name__)
"""


@pytest.mark.slow
def test_both_kinds_store_the_norm_of_experts_under_one_name(tmp_path: Path) -> None:
    done = run_python(SPECS, path=fake_te.make(tmp_path), MRL_PLATFORM_OFF="te_without_gpu")
    assert done.stdout.splitlines() == [
        "['mlp.linear_fc1.layer_norm_', 'mlp.linear_fc1.layer_norm_']",
        "['TransformerLayer', 'InPlaceGradients'] TENorm",
    ], done.stderr


def test_only_the_layers_are_told_to_add_to_gradients_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    platform.install()
    from mrl.models import specs

    told: list[bool] = []
    monkeypatch.setattr(
        specs.TransformerLayer,
        "__init__",
        lambda self, config, **other: told.append(config.gradient_accumulation_fusion),
    )
    config: Any = SimpleNamespace(gradient_accumulation_fusion=False)
    specs.InPlaceGradients(config, layer_number=1)
    assert told == [True] and config.gradient_accumulation_fusion is False


def rename(metadata: Path, ours: str, theirs: str) -> None:
    content = pickle.loads(metadata.read_bytes())
    content.state_dict_metadata[theirs] = content.state_dict_metadata.pop(ours)
    for index in [index for index in content.storage_data if index.fqn == ours]:
        content.storage_data[replace(index, fqn=theirs)] = content.storage_data.pop(index)
    metadata.write_bytes(pickle.dumps(content))


def test_a_checkpoint_of_megatron_s_own_experts_is_converted(tiny_models: Callable[..., Path], tmp_path: Path) -> None:
    """A checkpoint of experts that was made with transformer-engine elsewhere is converted, although the norm before
    the experts has another name there."""
    model = tiny_models("qwen3_moe")
    code, _, errors = mrl("convert", "hf-to-megatron", model, tmp_path / "made")
    assert code == 0, errors
    rename(tmp_path / "made" / "release" / ".metadata", *(f"decoder.layers{end}" for end in OF_EXPERTS))
    code, _, errors = mrl(
        "convert",
        "megatron-to-hf",
        tmp_path / "made" / "release",
        tmp_path / "back",
        "--model-files",
        model,
        "--verify",
    )
    assert code == 0, errors
    want, got = (load_file(path / "model.safetensors") for path in (model, tmp_path / "back"))
    assert want.keys() == got.keys() and all(torch.equal(got[name], want[name]) for name in want)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("there is nothing to set")


def test_a_parameter_that_is_missing_or_left_over_is_an_error() -> None:
    from mrl.weights.model.state import fill

    chunk = nn.ModuleDict({"a": Layer(), "b": Layer()})
    fill(chunk, {"a.weight": torch.ones(2), "b.weight": torch.ones(2)})
    assert chunk["a"].weight.tolist() == [1.0, 1.0]
    with pytest.raises(WeightError, match=r"b.weight is missing; the model has no c.weight"):
        fill(chunk, {"a.weight": torch.ones(2), "c.weight": torch.ones(2)})


def marked(row: ParameterMapping, **attributes: Any) -> dict[str, Any]:
    parameter = nn.Parameter(torch.zeros(4, 4))
    vars(parameter).update(attributes)
    _mark(ParameterLoad("layer.mlp.linear_fc2.weight", parameter, row, []), 2)
    return vars(parameter)


def test_how_experts_are_cut_is_the_table_s_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight table decides how experts are split. With expert parallelism transformer-engine marks dimension 0 for
    all its grouped matrices."""
    said = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
    of_experts = SimpleNamespace(tp_dim=1, expert=True)
    assert marked(of_experts, **said)["partition_dim"] == 1  # type: ignore[arg-type]
    with pytest.raises(WeightError, match="the model splits dimension 0, but the weight table dimension 1"):
        marked(SimpleNamespace(tp_dim=1, expert=False), **said)  # type: ignore[arg-type]
