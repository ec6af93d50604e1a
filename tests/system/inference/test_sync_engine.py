"""Weight sync to a real SGLang server over every transport; test_engine_families.py tests other families."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.schema import SyncConfig
from mrl.inference.engine import Engine
from mrl.weights.errors import SyncError, SyncMismatch
from mrl.weights.sync.payload import Bucket
from mrl.weights.sync.transports.shared_memory import SharedMemory
from mrl.weights.sync.weight_sync import WeightSync
from tests.helpers.served import TRANSPORTS, Served, check_deltas, check_transport, check_world, world
from tests.helpers.sync_tools import FileExporter

pytestmark = [pytest.mark.long, pytest.mark.engine]


@pytest.fixture(scope="module")
def llama(sglang_engine: Engine, tiny_models: Any) -> Iterator[Served]:
    served = Served(sglang_engine, tiny_models("llama"), tiny_models("llama", seed=1), 1)
    yield served
    served.load(served.old)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_llama_over_every_transport(llama: Served, transport: str) -> None:
    check_transport(llama, transport, llama.load(llama.new))


@pytest.mark.parametrize("transport", ["http", "distributed"])
def test_changed_elements_only(llama: Served, transport: str) -> None:
    check_deltas(llama, transport)


def test_samples_come_from_the_new_weights_and_carry_their_version(llama: Served) -> None:
    llama.load(llama.new)
    expected = llama.greedy()
    llama.load(llama.old)
    before = llama.greedy()  # also fills the prefix cache
    with closing(llama.sync()) as sync:
        sync.update_weights("12")
    params = {"max_new_tokens": 1, "temperature": 0}
    answer = llama.client.generate({"input_ids": [5, 17, 99, 200, 42], "sampling_params": params})
    assert answer["meta_info"]["weight_version"] == "12"
    assert answer["meta_info"]["cached_tokens"] == 0
    assert llama.greedy() == expected != before


def test_a_corrupted_bucket_is_caught_and_named(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SharedMemory.send

    def send(self: SharedMemory, bucket: Bucket, flat: torch.Tensor) -> None:
        for name, view in bucket.views(flat):
            if name in ("model.layers.1.self_attn.v_proj.weight", "model.norm.weight"):
                view.view(torch.int32).view(-1)[3] ^= 1
        original(self, bucket, flat)

    monkeypatch.setattr(SharedMemory, "send", send)
    with closing(llama.sync()) as sync, pytest.raises(SyncMismatch) as caught:
        sync.update_weights("5")
    message = str(caught.value)
    assert "2 of 15 engine parameters differ" in message
    assert "model.norm.weight: trainer " in message
    assert "model.layers.1.self_attn.qkv_proj.weight (made of" in message
    assert "model.layers.1.self_attn.v_proj.weight" in message and "layers.0" not in message
    held = llama.hashes()[0].checksums["model.norm.weight"]
    assert f"engine {llama.engine.urls[0]} {held}" in message
    monkeypatch.undo()
    with closing(llama.sync()) as sync:
        assert sync.update_weights("6").verified > 0


def test_without_verification_nothing_is_hashed(llama: Served) -> None:
    with closing(llama.sync(verify="off")) as sync:
        assert sync.update_weights("9").verified == 0


def test_cuda_ipc_is_refused_on_a_cpu(llama: Served) -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")
    with pytest.raises(SyncError, match="cuda_ipc needs the model on a CUDA device"):
        llama.sync("cuda_ipc").update_weights("1")


def test_a_wrong_tensor_size_of_the_engine_is_named(llama: Served) -> None:
    cfg = SyncConfig(transport="http", verify="checksum", timeout_s=30.0)
    with pytest.raises(SyncError, match="has 1 tensor-parallel ranks; the sync was for 2"):
        access = llama.engine.pool.access
        WeightSync(FileExporter(llama.new), llama.engine.urls, cfg, 2, access=access).update_weights("1")


def test_megatron_models_on_two_ranks(llama: Served, tmp_path: Path) -> None:
    layouts = [{"tensor": 2}, {"pipeline": 2}, {}]
    check_world(llama, world(llama, layouts, TRANSPORTS, tmp_path), llama.load(llama.new))
