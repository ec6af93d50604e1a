"""Families with gated delta nets, which need the newer megatron-core: separate packed sequences, conversion, critics,
LoRA.

test_families.py tests their log-probs and gradients, test_checkpoint.py their resuming.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl import platform
from mrl.config.schema import ParallelConfig, TrainConfig
from mrl.core import Rollout
from mrl.data.packing import pack
from mrl.families import load_arch
from mrl.families.adapters import LoRA, adapter_table
from mrl.families.engine_cache import state_bytes
from mrl.families.table import DELTA_CHUNK, weight_table
from mrl.kernels.gated_delta import Chunks, gated_delta_rule
from mrl.models.batch import ModelBatch
from mrl.models.build import build_model
from mrl.models.lora_layer import LayerSharding
from mrl.parallel import Mesh
from mrl.plan.activations import Shapes, Tokens, recomputed_bytes
from mrl.weights.parameter_layout import to_hf, to_megatron
from tests.conftest import TinyModels
from tests.distributed.weights.test_weights_worlds import EP2PP2, TP2PP2, World, check_parity, key, write_reference
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import DELTA_FAMILIES, make_tiny
from tests.helpers.world import run_world

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not DELTA_FAMILIES, reason="the installed megatron-core has no packed gated delta nets"),
]
DENSE = "qwen3_5_text"
LENGTHS = (70, 3, 130, 64, 9)
TP1: dict[str, int] = {}
LAYOUTS = {"qwen3_next": EP2PP2, DENSE: TP2PP2, **dict(slow_cases(("qwen3_5_moe_text", EP2PP2)))}
ADAPTERS = {
    "moe": ("qwen3_next", "tp2.ep2"),
    "delta": (DENSE, "tp2.cp2"),
    **dict(slow_cases(("dense", (DENSE, "tp2.pp2")))),
}
SHAPE: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64}


def rollout_of(changed: int | None) -> Rollout:
    g = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, 300, (n,), generator=g) for n in LENGTHS]
    if changed is not None:
        sequences[changed] = (sequences[changed] + 7) % 300
    return Rollout.of(0, [s[:1].tolist() for s in sequences], [s[1:].tolist() for s in sequences])


@pytest.mark.parametrize("changed", [0, 2, 4])
def test_no_bit_of_a_packed_sequence_depends_on_another(tiny_models: TinyModels, changed: int) -> None:
    """Neither log-probs nor gradients of a packed sequence depend on another sequence, bit for bit."""
    path, train = str(tiny_models(DENSE, weights=False)), TrainConfig()
    counts = torch.tensor(LENGTHS) - 1
    others = torch.arange(len(LENGTHS)).repeat_interleave(counts) != changed
    found = []
    with platform.fake_rank(0, 1, "cpu"), (mesh := Mesh(train.parallel)).active():
        for rollout in (rollout_of(None), rollout_of(changed)):
            (model,) = build_model(load_arch(path), path, train, mesh, torch.float32, "policy", seed=1)
            batch = pack(rollout, range(len(LENGTHS)), 1, 0, 1)
            made = ModelBatch.make(batch, mesh, 1.0, "log_probs")
            log_probs = model(batch.tokens, batch.position_ids, None, packed_seq_params=made)[0]
            (log_probs * others).sum().backward()
            found.append((log_probs.detach(), [parameter.grad for parameter in model.parameters()]))
    (one, gradients), (other, same_gradients) = found
    assert torch.equal(one[others], other[others]) and not torch.equal(one[~others], other[~others])
    assert all(torch.equal(a, b) for a, b in zip(gradients, same_gradients, strict=True))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", DELTA_FAMILIES)
def test_adapters_of_joined_projections_are_the_hub_s(tiny_models: TinyModels, family: str, tp: int) -> None:
    """Adapters of joined projections add to the layer's weight what the hub's adapters add, in the layer's row
    order."""
    arch = load_arch(tiny_models(family, weights=False))
    name = "decoder.layers.0.self_attention.in_proj"
    row, table = weight_table(arch)[name + ".weight"], adapter_table(arch, "policy", LoRA(3, 3.0, ("all-linear",)))
    g, parts, added = torch.Generator().manual_seed(0), [], []
    for hf, shape in zip(row.hf, row.shapes, strict=True):
        part = hf.split(".")[-2]
        own = table[f"{name}.lora.{part}.B"]
        a, b = torch.randn(3, shape[1], generator=g), torch.randn(shape[0], 3, generator=g)
        shards = [to_megatron(own, [b], arch, tp, rank) for rank in range(tp)]
        assert torch.equal(to_hf(own, shards, arch)[0], b)
        parts.append([shard @ a for shard in shards])
        added.append(b @ a)
    assert arch.delta is not None
    place = LayerSharding(by_rows=True, tp=tp, group=None, is_sequence=False, groups=arch.delta.key_heads // tp)
    for rank in range(tp):
        joined = place.join([part[rank] for part in parts], 0)
        assert torch.allclose(joined, to_megatron(row, added, arch, tp, rank), atol=1e-5)


def test_the_plan_knows_a_request_s_states(tiny_models: TinyModels) -> None:
    path = tiny_models(DENSE)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        cache = model(torch.tensor([[5, 6, 7, 8, 9]]), use_cache=True).past_key_values
    layers = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    held = sum(layer.recurrent_states[0].nbytes + layer.conv_states[0].nbytes for layer in layers)
    assert held == state_bytes(load_arch(path)) > 0


def test_the_plan_knows_what_the_rule_holds(tiny_models: TinyModels) -> None:
    arch, lengths = load_arch(tiny_models(DENSE, weights=False)), [120, 128]
    assert arch.delta is not None
    heads, tokens, kept = arch.delta.value_heads, sum(lengths), dict[int, int]()

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    given = [torch.rand(tokens, *shape) for shape in ((heads, arch.delta.key), (heads, arch.delta.value), (heads,))]
    key, value, beta = (x.requires_grad_() for x in given)
    chunks = Chunks.make(torch.tensor([0, *lengths]).cumsum(0), DELTA_CHUNK, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gated_delta_rule(key * 2, key * 3, value, -beta, beta, chunks)
    shapes = Shapes(arch, ParallelConfig(), 4, "local", Tokens(tokens, tokens, tokens // len(lengths)))
    assert 1.0 < recomputed_bytes(shapes, arch.layers[0]) / sum(kept.values()) < 1.4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {name: make_tiny(root / name, name, num_hidden_layers=4, vocab_size=323) for name in LAYOUTS}
    for path in made.values():
        write_reference(path, fused=False)
    return made


@pytest.fixture(scope="module")
def world(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> World:
    out = tmp_path_factory.mktemp("converted")
    jobs: list[tuple[str, str, dict[str, int]]] = [("convert", model, TP1) for model in models]
    jobs += [(check, model, LAYOUTS[model]) for model in models for check in ("load", "logits", "critic")]
    jobs += [("back", model, TP1) for model in models]
    specs = [
        {
            "check": check,
            "model": str(models[model]),
            "converted": str(out / model),
            "layout": layout,
            "out": str(out / key(check, model, layout)),
            "dtype": "float32",
        }
        for check, model, layout in jobs
    ]
    (out / "jobs.json").write_text(json.dumps(specs))
    run_world(4, "convert.py", out / "jobs.json", out / "results.json")
    results = json.loads((out / "results.json").read_text())
    return World({key(*job): result for job, result in zip(jobs, results, strict=True)}, out)


@pytest.mark.parametrize("model", LAYOUTS)
def test_a_converted_model_is_the_same_bits(world: World, model: str) -> None:
    """A converted model has the same bits in another layout, loaded by mrl and by Megatron, and converted back."""
    loaded, back = world("load", model, LAYOUTS[model]), world("back", model, TP1)
    assert loaded["parameters"] > 5 and loaded["trainer"] == loaded["megatron"] == back["wrong"] == []
    check_parity(world("logits", model, LAYOUTS[model]))


@pytest.mark.parametrize("model", LAYOUTS)
def test_critics(world: World, model: str) -> None:
    result = world("critic", model, LAYOUTS[model])
    assert result["role"] == "critic" and result["from_policy"] == result["converted"] == result["returned"] == []


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lora")
    made = {family: make_tiny(folder / family, family, **SHAPE) for family in ("qwen3_next", DENSE)}
    cases = {f"{kind}={made[family]}": layout for kind, (family, layout) in ADAPTERS.items()}
    plain = made[DENSE], made["qwen3_next"]
    run_world(1, "lora.py", folder, *plain, *(f"{case} one" for case in cases))
    output = run_world(4, "lora.py", folder, *plain, *(f"{case} {layout}" for case, layout in cases.items()))
    found = {case.pop("case"): case for case in map(json.loads, output.splitlines())}
    return {name.split("=")[0]: case for name, case in found.items()}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_gradients_of_adapters_are_one_process_own(adapted: dict[str, dict[str, Any]], kind: str) -> None:
    found = adapted[kind]
    assert max(found[name] for name in ("out", "loss", "norm", "gradients")) < 2e-5, found
    if kind != "moe":  # some of its experts get no token
        assert found["smallest"] > 1e-3, "an adapter has no gradient"
