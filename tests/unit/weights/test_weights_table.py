"""The weight table and its kinds as pure functions, without a process group or a Megatron model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mrl.families import LayerArch, ModelArch, load_arch
from mrl.families.rows import ParameterMapping
from mrl.families.stacks import stored_name
from mrl.families.table import weight_table
from mrl.models.naming import global_name
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.parameter_layout import to_hf, to_megatron
from tests.helpers.tiny import FAMILIES, MOE_FAMILIES, make_tiny

PADDED_VOCAB = 352  # the files have 320 rows; at TP4 the last shard is partly padding


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    alike = {"num_key_value_heads": 8}  # with latent attention every head has its own keys and values
    own = {family: shape | (alike if family == "deepseek_v3" else {}) for family in FAMILIES}
    made = {family: make_tiny(root / family, family, **own[family]) for family in FAMILIES}
    made["llama tied"] = make_tiny(root / "tied", "llama", tied=True, **shape)
    return made


def sources_of(checkpoint: HFCheckpoint, row: ParameterMapping) -> list[Any]:
    return [checkpoint.source(name, shape) for name, shape in zip(row.hf, row.shapes, strict=True)]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", [*FAMILIES, "llama tied"])
def test_every_tensor_of_the_file_survives_the_round_trip(models: dict[str, Path], name: str, tp: int) -> None:
    arch = load_arch(models[name])
    seen: dict[str, torch.Tensor] = {}
    with HFCheckpoint(models[name]) as checkpoint:
        for row in weight_table(arch).values():
            sources = sources_of(checkpoint, row)
            shards = [to_megatron(row, sources, arch, tp, rank, PADDED_VOCAB) for rank in range(tp)]
            back = to_hf(row, shards, arch)
            assert [tuple(tensor.shape) for tensor in back] == list(row.shapes)
            seen.update(zip(row.hf, back, strict=True))
        assert {stored_name(name) for name in seen} == set(checkpoint)
        for key, tensor in seen.items():
            assert tensor.is_contiguous() and torch.equal(tensor, checkpoint.source(key)[:]), key


def small_arch() -> ModelArch:
    return ModelArch(
        family="qwen2", vocab_size=5, hidden_size=3, layers=(LayerArch(4),), num_heads=4, num_kv_heads=2, head_dim=1,
        norm_eps=1e-6, tied_embeddings=False, qkv_bias=True, qk_norm=False, max_positions=8, initializer_range=0.02,
        eos_token_ids=(),
    )  # fmt: skip


def test_qkv_puts_each_groups_heads_together() -> None:
    arch = small_arch()
    row = weight_table(arch)["decoder.layers.0.self_attention.linear_qkv.bias"]
    q, k, v = torch.tensor([0.0, 1, 2, 3]), torch.tensor([10.0, 11]), torch.tensor([20.0, 21])
    assert to_megatron(row, (q, k, v), arch).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert to_megatron(row, (q, k, v), arch, tp=2, tp_rank=1).tolist() == [2, 3, 11, 21]


def test_a_rank_holds_its_part_of_gate_then_its_part_of_up() -> None:
    arch = small_arch()
    row = weight_table(arch)["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = (torch.arange(4.0)[:, None].expand(4, 3) + start for start in (0, 10))
    assert to_megatron(row, (gate, up), arch, tp=2, tp_rank=0)[:, 0].tolist() == [0, 1, 10, 11]
    assert to_megatron(row, (gate, up), arch, tp=2, tp_rank=1)[:, 0].tolist() == [2, 3, 12, 13]


def test_vocabulary_padding_is_zero_and_goes_away() -> None:
    arch = small_arch()
    row = weight_table(arch)["embedding.word_embeddings.weight"]
    table = torch.arange(1.0, 16.0).view(5, 3)
    shards = [to_megatron(row, (table,), arch, 4, rank, 16) for rank in range(4)]
    assert [shard.shape[0] for shard in shards] == [4] * 4
    assert torch.equal(shards[1][:1], table[4:]) and not shards[1][1:].any() and not shards[3].any()
    assert torch.equal(to_hf(row, shards, arch)[0], table)


def test_an_uneven_cut_is_an_error() -> None:
    arch = small_arch()
    row = weight_table(arch)["decoder.layers.0.mlp.linear_fc2.weight"]
    with pytest.raises(ValueError, match="4 cannot be split into 3"):
        to_megatron(row, (torch.zeros(3, 4),), arch, 3, 0)


def test_critic_has_a_value_head_instead_of_an_output_layer() -> None:
    arch = small_arch()
    policy, critic = weight_table(arch), weight_table(arch, "critic")
    assert set(policy) - set(critic) == {"output_layer.weight"}
    assert set(critic) - set(policy) == {"value_head.weight"}
    assert critic["value_head.weight"].hf == ("score.weight",)


class Recorder:
    """A tensor that counts the elements that were read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.read = tensor, tuple(tensor.shape), 0

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.tensor[index]
        self.read += part.numel()
        return part


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_reads_only_its_part(models: dict[str, Path], name: str) -> None:
    arch = load_arch(models[name])
    with HFCheckpoint(models[name]) as checkpoint:
        for row in weight_table(arch).values():
            recorders = [Recorder(source[:]) for source in sources_of(checkpoint, row)]
            shard = to_megatron(row, recorders, arch, 4, 1, 320)
            assert sum(recorder.read for recorder in recorders) == shard.numel()


@pytest.mark.parametrize("name", MOE_FAMILIES)
def test_fused_experts_on_disk_are_the_same_experts(models: dict[str, Path], name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    fused_dir = tmp_path / "fused"
    AutoModelForCausalLM.from_pretrained(models[name]).save_pretrained(fused_dir, save_original_format=False)
    arch = load_arch(models[name])
    rows = {key: row for key, row in weight_table(arch).items() if row.aliases}
    with HFCheckpoint(models[name]) as classic, HFCheckpoint(fused_dir) as fused:
        assert any(name.endswith("experts.gate_up_proj") for name in fused)
        for key, row in rows.items():
            other = [
                fused.source(alias.name, alias.shape).narrow(alias.ranges, len(shape))
                for alias, shape in zip(row.aliases, row.shapes, strict=True)
            ]
            for rank in range(2):
                want = to_megatron(row, sources_of(classic, row), arch, 2, rank)
                assert torch.equal(to_megatron(row, other, arch, 2, rank), want), key


class Chunk(nn.Module):
    """The parts of a Megatron model that give names: the second stage's layers, the second half of the experts."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Module(), nn.Module()]
        for number, layer in zip((3, 4), layers, strict=True):
            layer.layer_number = number
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(layers)
        self.config = SimpleNamespace(num_moe_experts=8, expert_model_parallel_size=2)
        self.pg_collection = SimpleNamespace(ep=SimpleNamespace(rank=lambda: 1))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_transformer_engine_names_are_in_the_table(models: dict[str, Path], family: str) -> None:
    arch = load_arch(models[family])
    arch = replace(arch, layers=arch.layers[:1] * 4, experts=arch.experts and replace(arch.experts, count=8))
    dense = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight": "mlp.linear_fc1.weight",
    }
    experts = {
        "mlp.experts.linear_fc2.weight3": "mlp.experts.local_experts.7.linear_fc2.weight",
        "mlp.experts.local_experts.0.linear_fc1.weight": "mlp.experts.local_experts.4.linear_fc1.weight",
        "mlp.router.weight": "mlp.router.weight",
    }
    for engine, local in (dense if family == "qwen3" else experts).items():
        name = global_name(Chunk(), f"decoder.layers.1.{engine}")
        assert name == f"decoder.layers.3.{local}"
        assert name in weight_table(arch)
