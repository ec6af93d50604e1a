"""Models that give their memory up between the phases of a step: the same run, with less on the device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.platform import OffloadBuffer, host_bytes
from mrl.rollout import MemoryPart
from mrl.trainers.rl.memory_order import ORDER
from mrl.trainers.shared.memory import AWAKE, PhaseMemoryManager
from tests.conftest import TinyModels
from tests.world import ROOT, run_world

PPO, GRPO, EXPERTS = "PPO, TP2 x PP2, float32", "GRPO, TP2 x DP2, bfloat16", "PPO, experts, bfloat16"
GIVEN_UP = [(PPO, "optimizer"), (PPO, "all"), (GRPO, "optimizer"), (GRPO, "all"), (EXPERTS, "all")]
SHAPE: dict[str, Any] = {
    "weights": False,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_key_value_heads": 4,
    "vocab_size": 321,
}


@pytest.fixture(scope="module")
def world(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the world of 4 processes reports, by case."""
    dense = tiny_models("llama", tied=True, num_hidden_layers=4, **SHAPE)
    moe = tiny_models("qwen3_moe", moe_intermediate_size=32, **(SHAPE | {"head_dim": 16}))
    output = run_world(4, "memory.py", tmp_path_factory.mktemp("memory"), dense, moe)
    return {case.pop("case"): case for case in map(json.loads, output.splitlines())}


@pytest.mark.parametrize(("case", "offload"), GIVEN_UP)
def test_weights_adam_and_metrics_are_the_same_to_the_bit(world: dict[str, Any], case: str, offload: str) -> None:
    found = world[f"{case}, {offload}"]
    assert found["metrics"] and found["bits"]


@pytest.mark.parametrize("case", [PPO, GRPO, EXPERTS])
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
            of_models_not_trained = model in ("ref", "reward") and offload == "optimizer"  # theirs is none
            if level == "all":
                want = sum(parts.values())
            elif level == "parameters" or offload == "optimizer" or of_models_not_trained:
                want = parts["parameters"]
            else:
                want = 0
            assert held == want, (phase, model)


@pytest.mark.parametrize("case", [PPO, GRPO, EXPERTS])
def test_nothing_else_of_the_models_is_left(world: dict[str, Any], case: str) -> None:
    """No copy of weights, gradients or moments beside those that are counted."""
    found = world[f"{case}, all"]
    assert found["beyond"]["rollout"] < 0.5 * found["parts"]["actor"]["parameters"]


def test_the_parts_are_those_of_the_layout(world: dict[str, Any]) -> None:
    """float32 weights are their own main weights, and their padding has no moments; over two data-parallel ranks each
    has half of main weights and moments."""
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


def storages(tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors]


def test_a_room_keeps_views_and_bits_and_is_made_once() -> None:
    whole, half = torch.randn(5, 7), torch.randn(3).bfloat16()
    view, before = whole.view(-1)[3:9], (whole.clone(), half.clone())
    buffer = OffloadBuffer()
    assert buffer.offload(storages([whole, half])) == 140 + 6
    assert [storage.nbytes() for storage in storages([whole, half, view])] == [0, 0, 0]
    found = buffer.host_view(view)
    assert found is not None and torch.equal(found, before[0].view(-1)[3:9])
    found.zero_()
    memory = buffer._buffer
    assert buffer.reload() == 146 and buffer.host_view(whole) is None
    assert torch.equal(whole.view(-1)[:3], before[0].view(-1)[:3]) and not view.any() and torch.equal(half, before[1])
    assert buffer.offload(storages([whole, half]), same=True) == 0, "what has not changed is there already"
    buffer.reload()
    half.fill_(2)
    buffer.offload(storages([whole, half]))
    assert buffer._buffer is memory
    buffer.reload()
    assert torch.equal(half, torch.full_like(half, 2))


def test_memory_that_is_shared_is_not_given_up_and_its_bytes_can_be_read_without_sharing_it() -> None:
    alone, shared = torch.arange(6).reshape(2, 3), torch.zeros(2)
    assert bytes(host_bytes(alone)) == alone.numpy().tobytes()
    alone, other = alone.clone(), shared.numpy()
    host_bytes(alone)
    buffer = OffloadBuffer()
    with pytest.raises(RuntimeError, match="this memory is shared"):
        buffer.offload(storages([alone, shared]))
    assert not buffer.is_offloaded and alone.sum() == 15 and other.sum() == 0
    buffer.offload(storages([alone]))
    buffer.reload()


class Engines:
    """Writes down what it is told."""

    def __init__(self, parts: tuple[MemoryPart, ...]) -> None:
        self.parts, self.lacks_weights = parts, False
        self.told: list[tuple[str, tuple[MemoryPart, ...]]] = []

    def release(self, parts: tuple[MemoryPart, ...]) -> bool:
        self.told.append(("release", parts))
        self.lacks_weights |= "weights" in parts
        return self.lacks_weights

    def resume(self, parts: tuple[MemoryPart, ...]) -> bool:
        self.told.append(("resume", parts))
        return self.lacks_weights


STEP = ("rollout", "experience", "update", "actor_update", "critic_update", "sync", "checkpoint", "rollout")


def test_the_engines_release_and_resume_in_the_order_that_a_push_needs() -> None:
    engines = Engines(AWAKE)
    order = PhaseMemoryManager(ORDER, {}, engines)
    for phase in STEP[:-3]:
        order.begin(phase)
    assert engines.told == [("release", AWAKE)] and order.needs_weight_sync
    for phase in STEP[-3:]:
        order.begin(phase)
    assert engines.told[1:] == [("resume", ("weights",)), ("resume", ("kv_cache", "cuda_graph"))]


def test_engines_that_keep_their_weights_need_no_push() -> None:
    engines = Engines(("kv_cache", "cuda_graph"))
    order = PhaseMemoryManager(ORDER, {}, engines)
    for phase in STEP:
        order.begin(phase)
    assert engines.told == [("release", ("kv_cache", "cuda_graph")), ("resume", ("kv_cache", "cuda_graph"))]
    assert not order.needs_weight_sync


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0] in ORDER:
            yield cells[0], cells[1:]


def test_the_table_of_the_docs_is_the_table() -> None:
    written = dict(rows((ROOT / "docs/gpu.md").read_text()))
    engine = {AWAKE: "all", (): "nothing", ("weights",): "weights", None: "as it is"}
    short = {"nothing": "", "parameters": "parameters", "all": "all"}
    assert written == {
        phase: [*(short[needs.models[m]] for m in ("actor", "critic", "ref", "reward")), engine[needs.engine]]
        for phase, needs in ORDER.items()
    }


def test_the_loop_asks_for_phases_that_are_in_the_table() -> None:
    sources = [*(ROOT / "mrl/trainers/rl").glob("*.py"), *(ROOT / "mrl/trainers/shared").glob("*.py")]
    asked = set(re.findall(r'memory\.(?:begin|during)\("([^"]+)"', "".join(map(Path.read_text, sources))))
    assert asked == set(ORDER) - {"rollout", "experience"}, "those two are begun by the phases of their names"
