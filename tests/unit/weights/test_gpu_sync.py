"""Weight sync paths of GPU machines, as far as a CPU can test them: the choice of transport, buffers, and a group whose
first broadcast blocks until the engine has joined, as NCCL's does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform
from mrl.config.checks import rollout as rollout_checks
from mrl.config.derived import Machine
from mrl.config.schema import RLConfig, RolloutConfig, SyncConfig
from mrl.inference.client import EngineClient, EngineError
from mrl.weights.errors import WeightError
from mrl.weights.meta import TensorMeta
from mrl.weights.sync.payload import Bucket, plan_buckets
from mrl.weights.sync.transports import Deadline, Engines, SenderLocation, resolve
from mrl.weights.sync.transports import cuda_ipc as cuda_ipc_module
from mrl.weights.sync.transports import distributed as distributed_module
from mrl.weights.sync.transports.base import HandleTransport
from mrl.weights.sync.transports.cuda_ipc import CudaIpc
from mrl.weights.sync.transports.distributed import Distributed
from mrl.weights.sync.weight_sync import WeightSync
from tests.conftest import TinyModels
from tests.helpers.sync_tools import FileExporter

CPU = torch.device("cpu")
LIMIT_S = 30.0  # a deadlock ends after this time


def buckets(count: int = 1) -> tuple[Bucket, ...]:
    return plan_buckets([TensorMeta(f"w{i}", (8,), torch.float32, 0) for i in range(count)], limit=32)


def fill(transport: Any, bucket: Bucket, value: float) -> Tensor:
    flat = transport.buffer(bucket)
    for _, view in bucket.views(flat):
        view.fill_(value)
    return flat


def test_auto_on_gpus_is_cuda_ipc_but_for_engines_that_know_cpu_tensors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda", 0))
    assert [resolve("auto", near, None) for near in (True, False)] == ["cuda_ipc", "distributed"]
    assert [resolve("auto", near, None, plain=True) for near in (True, False)] == ["shared_memory", "http"]
    assert resolve("auto", False, None, plain=True) == resolve("http", False, None, plain=True)


def test_a_group_with_engines_on_the_trainer_s_gpus_is_refused_before_the_start() -> None:
    def problems(gpus: int, *urls: str) -> list[Any]:
        cfg = RLConfig.model_construct(sync=SyncConfig(transport="distributed"), rollout=RolloutConfig(urls=urls))
        return list(rollout_checks._sync(cfg, Machine(1, 1, gpus)))

    (found,) = problems(8)
    assert found.keys[0] == "sync.transport" and "two members on one GPU" in found.message
    assert not problems(8, "http://far:30000") and not problems(0)
    apart = RolloutConfig(servers=2, gpus=(1, 3))
    cfg = RLConfig.model_construct(sync=SyncConfig(transport="distributed"), rollout=apart)
    assert not list(rollout_checks._sync(cfg, Machine(1, 1, 8)))
    (found,) = rollout_checks._sync(cfg, Machine(2, 2, 8))
    assert "engines and trainer ranks share GPU 1" in found.message


class SlowReader:
    """An engine whose second rank still reads a bucket when the first rank's reply arrives."""

    url = "http://slow"
    timeout_s = 0.0

    def __init__(self) -> None:
        self.mapped: list[Tensor] = []

    def update_weights_from_tensor(self, payloads: list[Tensor], load_format: str) -> None:
        assert load_format == "flattened_bucket" and len(payloads) == 2
        self.mapped.append(payloads[1])


def test_a_bucket_in_gpu_memory_is_never_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc_module, "_exported", lambda flat: flat)
    monkeypatch.setattr(cuda_ipc_module, "pickle_flat", lambda bucket, flat: flat)
    collected: list[bool] = []
    monkeypatch.setattr(platform, "release_shared_memory", lambda: collected.append(True))
    reader = SlowReader()
    place = SenderLocation(0, SimpleNamespace(type="cuda"), None)  # type: ignore[arg-type]
    transport = CudaIpc(Engines((reader,), 2, Deadline(5.0)), place)  # type: ignore[arg-type]
    object.__setattr__(place, "device", CPU)
    plan = buckets(3)
    transport.prepare(plan)
    for number, bucket in enumerate(plan):
        transport.send(bucket, fill(transport, bucket, number))
    assert [float(flat.view(torch.float32)[0]) for flat in reader.mapped] == [0.0, 1.0, 2.0]
    assert not collected
    transport.release(failed=False)
    assert collected == [True]


class Noted(EngineClient):
    """An engine client that records its requests and sends none."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.asked: list[str] = []

    def _call(self, endpoint: Any, body: Any = None) -> Any:
        self.asked.append(endpoint.name)


def test_buckets_in_gpu_memory_are_read_within_the_weight_update(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaIpc, "__init__", HandleTransport.__init__)
    monkeypatch.setattr(cuda_ipc_module, "_exported", lambda flat: flat)
    monkeypatch.setattr(cuda_ipc_module, "pickle_flat", lambda bucket, flat: flat)
    cfg = SyncConfig(transport="cuda_ipc", bucket_mib=1)
    engine = Noted()
    sync = WeightSync(FileExporter(tiny_models("llama")), [engine.url], cfg)
    sync._engines.clients = (engine,)
    assert sync.update_weights("1").transport == "cuda_ipc"
    begin, *reads, end, flush, version = engine.asked
    assert (begin, {*reads}) == ("begin_weight_update", {"update_weights_from_tensor"})
    assert (end, flush, version) == ("end_weight_update", "flush_cache", "update_weight_version")


class Group:
    """A group like NCCL's: the first broadcast connects, and returns once all others have joined."""

    def __init__(self, engines: int) -> None:
        self.engines_in = threading.Semaphore(0)
        self.engines = engines
        self.sent: list[float] = []

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        for _ in range(self.engines):
            self.engines_in.acquire()
        self.sent.append(float(tensors[0].view(torch.float32)[0]))
        return SimpleNamespace(wait=lambda timeout: True)


class AnEngine:
    """An engine. behaviour: accepts | refuses | loses (accepts, and the broadcast fails)"""

    timeout_s = 0.0

    def __init__(self, behaviour: str = "accepts", url: str = "http://engine") -> None:
        self.url = url
        self.behaviour, self.groups, self.left = behaviour, [], []

    def update_weights_from_distributed(self, *, group_name: str, **unused: Any) -> None:
        if self.behaviour == "refuses":
            raise EngineError(self.url, "update_weights_from_distributed", 400, "no session is open")
        self.groups[-1].engines_in.release()

    def destroy_weights_update_group(self, name: str) -> None:
        self.left.append(name)


@contextmanager
def joined(*engines: AnEngine) -> Iterator[Distributed]:
    transport = Distributed(Engines(engines, 1, Deadline(LIMIT_S)), SenderLocation(0, CPU, None))  # type: ignore[arg-type]

    def join() -> None:
        from mrl.weights.sync.transports.distributed import _Joined

        members: Any = transport.engines.clients
        group = Group(len(members))
        for engine in members:
            engine.groups.append(group)
        transport._joined = _Joined(f"group {len(members[0].groups)}", members, group=group)

    transport._join = join  # type: ignore[method-assign]
    yield transport


def push(transport: Distributed, value: float) -> None:
    plan = buckets()
    transport.prepare(plan)
    try:
        transport.send(plan[0], fill(transport, plan[0], value))
    except BaseException:
        transport.release(failed=True)
        raise
    transport.release(failed=False)


def test_the_engine_is_asked_before_the_broadcast_returns() -> None:
    one, two = AnEngine(), AnEngine()
    with joined(one, two) as transport:
        for value in (3.0, 4.0):
            push(transport, value)
    assert [engine.groups[0].sent for engine in (one, two)] == [[3.0, 4.0]] * 2
    assert len(one.groups) == 1


def test_a_refusal_is_one_error_and_its_group_is_given_up() -> None:
    engine, began = AnEngine("refuses"), time.monotonic()
    with joined(engine) as transport:
        with pytest.raises(EngineError, match="no session is open"):
            push(transport, 1.0)
        assert time.monotonic() - began < LIMIT_S, "the broadcast that nobody receives was waited for"
        assert engine.left == ["group 1"] and transport._joined is None
        assert [given_up.name for given_up in transport._abandoned] == ["group 1"]
        engine.behaviour = "accepts"
        push(transport, 2.0)
    assert engine.groups[1].sent == [2.0] and engine.groups[0].sent == []


def test_a_broadcast_that_never_ends_is_an_error_in_time() -> None:
    engine = AnEngine()
    engine.update_weights_from_distributed = lambda **unused: None  # type: ignore[method-assign]
    with joined(engine) as transport:
        transport.engines.deadline = Deadline(0.2)
        with pytest.raises(WeightError, match="the broadcast to http://engine did not end within 0.2 s"):
            push(transport, 1.0)
        assert engine.left == ["group 1"]


def test_engines_here_and_elsewhere_meet_at_an_address_that_both_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"http://here": "127.0.0.1", "http://there": "10.0.0.7"}
    monkeypatch.setattr(distributed_module, "own_address", seen.__getitem__)
    here, there = (AnEngine(url=url) for url in seen)
    found = [distributed_module._address_for(some) for some in ([here, there], [there, here], [here])]  # type: ignore[list-item]
    assert found == ["10.0.0.7", "10.0.0.7", "127.0.0.1"]


class RefusingEngine(AnEngine):
    """Joins a real gloo group in a thread, and then refuses the bucket."""

    def init_weights_update_group(
        self, *, master_address: str, master_port: int, group_name: str, **unused: Any
    ) -> None:
        store = dist.TCPStore(master_address, master_port, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S))
        store.set("here", "yes")
        keys = dist.PrefixStore("cpu/", dist.PrefixStore(f"{group_name}/", dist.PrefixStore(group_name, store)))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=LIMIT_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=master_address)]
        self.groups.append(dist.ProcessGroupGloo(keys, 1, 2, options))

    def update_weights_from_distributed(self, *, group_name: str, **unused: Any) -> None:
        if self.behaviour == "refuses":
            raise EngineError(self.url, "update_weights_from_distributed", 400, "no session is open")
        flat = torch.empty(32, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.groups[-1].broadcast([flat], options).wait()
        self.received = float(flat.view(torch.float32)[0])

    def destroy_weights_update_group(self, name: str) -> None:
        super().destroy_weights_update_group(name)
        self.groups.clear()


def test_a_refused_bucket_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.weights.sync.transports.distributed.own_address", lambda url: "127.0.0.1")
    engine = RefusingEngine("refuses")
    engines = Engines((engine,), 1, Deadline(LIMIT_S))  # type: ignore[arg-type]
    transport, began = Distributed(engines, SenderLocation(0, CPU, None)), time.monotonic()
    with pytest.raises(EngineError, match="no session is open"):
        push(transport, 1.0)
    engine.behaviour = "accepts"
    push(transport, 2.0)
    assert engine.received == 2.0 and time.monotonic() - began < LIMIT_S
    transport.close()
