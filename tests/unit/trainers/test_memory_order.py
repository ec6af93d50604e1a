"""The order in which models and engines release memory in the phases of a step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl.inference.protocol import MemoryPart
from mrl.platform import OffloadBuffer, host_bytes
from mrl.trainers.rl.memory_order import ORDER
from mrl.trainers.shared.memory import AWAKE, PhaseMemoryManager
from tests.helpers.world import ROOT


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
    """Engines that record their requests."""

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
