"""Weights pushed into real SGLang servers, over every transport, for every family."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.schema import RolloutConfig, SyncConfig
from mrl.rollout import Engine, start_engine
from mrl.rollout.client import EngineClient
from mrl.weights.errors import SyncError, SyncMismatch
from mrl.weights.payload import Bucket
from mrl.weights.sync import WeightSync
from mrl.weights.transports.shared_memory import SharedMemory
from tests.sync_tools import FileExporter
from tests.world import run_world

pytestmark = pytest.mark.engine

TRANSPORTS = ("shared_memory", "http", "distributed", "disk")
# family -> (model settings, tensor parallelism of the engine)
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2": ({"tied": True, "vocab_size": 301}, 2),
    "qwen3": ({}, 1),
    "mistral": ({}, 1),
    "mixtral": ({}, 1),
    "qwen3_moe": ({}, 1),
}


@dataclass(frozen=True)
class Served:
    """A server that began with the weights of `old`; `new` is another model of the same shape."""

    engine: Engine
    old: Path
    new: Path
    tensor: int

    @property
    def client(self) -> EngineClient:
        return EngineClient(self.engine.urls[0], 60.0)

    def hashes(self) -> list[Any]:
        return self.client.weights_checksum()

    def load(self, path: Path) -> list[Any]:
        """The engine's own loading of a directory, and what it then holds."""
        self.client.update_weights_from_disk(str(path), weight_version="old")
        return self.hashes()

    def greedy(self) -> list[int]:
        params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        return self.client.generate({"input_ids": [5, 17, 99, 200, 42], "sampling_params": params})["output_ids"]

    def sync(self, transport: str = "shared_memory", verify: str = "checksum") -> WeightSync:
        cfg = SyncConfig(transport=transport, verify=verify, timeout_s=60.0, bucket_mib=1)  # type: ignore[arg-type]
        return WeightSync(FileExporter(self.new), self.engine.urls, cfg, self.tensor)


@pytest.fixture(scope="module")
def llama(sglang_engine: Engine, tiny_models: Any) -> Iterator[Served]:
    served = Served(sglang_engine, tiny_models("llama"), tiny_models("llama", seed=1), 1)
    yield served
    served.load(served.old)


def check_transport(served: Served, transport: str, expected: list[Any]) -> None:
    """A push makes the engine hold what it holds when it loads that model's directory by itself."""
    assert served.load(served.old) != expected
    with closing(served.sync(transport)) as sync:
        for version in ("3", "4"):  # the second push reuses what the first one set up
            report = sync.push(version)
            assert served.hashes() == expected
            assert report.transport == transport
            assert report.verified == report.tensors == len(FileExporter(served.new).tensors)
            assert report.bytes == sum(t.nbytes for t in FileExporter(served.new).tensors.values())
            assert served.client.model_info().weight_version == version
            served.load(served.old)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_llama_over_every_transport(llama: Served, transport: str) -> None:
    check_transport(llama, transport, llama.load(llama.new))


def test_samples_come_from_the_new_weights_and_carry_their_version(llama: Served) -> None:
    llama.load(llama.new)
    expected = llama.greedy()
    llama.load(llama.old)
    before = llama.greedy()  # also fills the prefix cache
    with closing(llama.sync()) as sync:
        sync.push("12")
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
        sync.push("5")
    message = str(caught.value)
    assert "2 of 15 parameters differ" in message
    assert "model.norm.weight: trainer " in message
    assert "model.layers.1.self_attn.qkv_proj.weight (made of" in message
    assert "model.layers.1.self_attn.v_proj.weight" in message and "layers.0" not in message
    held = llama.hashes()[0].checksums["model.norm.weight"]
    assert f"engine {llama.engine.urls[0]} {held}" in message
    monkeypatch.undo()
    with closing(llama.sync()) as sync:
        assert sync.push("6").verified > 0


def test_without_verification_nothing_is_hashed(llama: Served) -> None:
    with closing(llama.sync(verify="off")) as sync:
        assert sync.push("9").verified == 0


def test_cuda_ipc_is_refused_on_a_cpu(llama: Served) -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")
    with pytest.raises(SyncError, match="cuda_ipc needs the model on a CUDA device"):
        llama.sync("cuda_ipc").push("1")


def test_a_wrong_tensor_size_of_the_engine_is_named(llama: Served) -> None:
    cfg = SyncConfig(transport="http", verify="checksum", timeout_s=30.0)
    with pytest.raises(SyncError, match="runs on 1 tensor-parallel ranks, rollout.tensor is 2"):
        WeightSync(FileExporter(llama.new), llama.engine.urls, cfg, 2).push("1")


def world(served: Served, layouts: list[dict[str, int]], transports: tuple[str, ...], out: Path) -> list[Any]:
    """Real Megatron models in a world of two, one push a (layout, transport)."""
    jobs = [{"layout": layout, "transport": transport} for layout in layouts for transport in transports]
    (out / "jobs.json").write_text(json.dumps(jobs))
    run_world(2, "sync.py", served.new, served.old, served.engine.urls[0], out / "jobs.json", out / "results")
    return list(zip(jobs, json.loads((out / "results").read_text()), strict=True))


def check_world(served: Served, results: list[Any], expected: list[Any]) -> None:
    hashes = {f"{rank.tp_rank} {name}": digest for rank in expected for name, digest in rank.checksums.items()}
    for job, result in results:
        assert result["before"] != hashes, job
        assert result["after"] == hashes, job
        assert result["verified"] == result["tensors"] == len(FileExporter(served.new).tensors), job


def test_megatron_models_on_two_ranks(llama: Served, tmp_path: Path) -> None:
    layouts = [{"tensor": 2}, {"pipeline": 2}, {}]
    check_world(llama, world(llama, layouts, TRANSPORTS, tmp_path), llama.load(llama.new))


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    settings, tensor = FAMILIES[request.param]
    old, new = (tiny_models(request.param, seed=seed, **settings) for seed in (0, 1))
    logs = tmp_path_factory.mktemp(f"logs_{request.param}")
    with start_engine(RolloutConfig(tensor=tensor), str(old), "float32", logs) as engine:
        engine.wait_ready()
        yield Served(engine, old, new, tensor)


def test_a_family_over_every_transport(served: Served, tmp_path: Path) -> None:
    """One test, as each family costs a server; ends by killing it in the middle of a push."""
    expected = served.load(served.new)
    for transport in TRANSPORTS:
        check_transport(served, transport, expected)
    if FileExporter(served.new).arch.num_experts:
        check_world(served, world(served, [{"expert": 2}], ("shared_memory", "distributed"), tmp_path), expected)
    killed_in_the_middle(served)


def killed_in_the_middle(served: Served) -> None:
    with closing(served.sync("distributed")) as sync:
        sync.push("8")
        assert sync._transport is not None
        send = sync._transport.send

        def kill_then_send(bucket: Bucket, flat: torch.Tensor) -> None:
            served.engine.close()
            send(bucket, flat)

        sync._transport.send = kill_then_send  # type: ignore[method-assign]
        started = time.monotonic()
        with pytest.raises(SyncError, match="sending failed: .*update_weights_from_distributed: no answer"):
            sync.push("9")
        assert time.monotonic() - started < 60.0
