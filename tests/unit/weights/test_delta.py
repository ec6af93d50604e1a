"""Delta weight sync: encoding, application to fused and sharded parameters, and syncs to an engine in this process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mrl.config.schema import DeltaSyncConfig, SyncConfig
from mrl.inference.access import Access
from mrl.inference.delta import DeltaMessage, apply, decode, encode, load
from mrl.inference.serving import Server
from mrl.inference.transformers_engine.server import Endpoints
from mrl.inference.transformers_engine.worker import Worker
from mrl.weights.errors import SyncError
from mrl.weights.meta import TensorMeta
from mrl.weights.sync.delta import DeltaState, Transition
from mrl.weights.sync.payload import plan_buckets
from mrl.weights.sync.transports.http import Http
from mrl.weights.sync.weight_sync import WeightSync
from tests.conftest import TinyModels
from tests.helpers.sync_tools import FileExporter

KEY = "key"


def changed(old: Tensor, share: float, seed: int, unit: int) -> Tensor:
    """Returns the bytes with about this share of their units replaced."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(-(-old.numel() // unit), generator=draw) < share
    mask = mask.repeat_interleave(unit)[: old.numel()]
    return torch.where(mask, torch.randint(0, 256, old.shape, generator=draw, dtype=torch.uint8), old)


@pytest.mark.parametrize("unit", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.0003, 0.03, 0.4])
@pytest.mark.parametrize("size", [40_000, 40_006, 3])
def test_changed_units_return_and_all_others_are_nan(unit: int, share: float, size: int) -> None:
    old = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    new = changed(old, share, 2, unit)
    changes, count = encode(new, old, unit)
    differs = nn.functional.pad(new != old, (0, -size % unit)).view(-1, unit).any(1)
    assert count == int(differs.sum())
    if changes is None:
        assert count * (unit + 1) + differs.numel() // 255 >= size
        return
    assert changes.numel() < size
    got, kept = decode(changes, size, unit, count), differs.repeat_interleave(unit)[:size]
    assert torch.equal(got[kept], new[kept]) and bool((got[~kept] == 0xFF).all())


def test_gaps_beyond_a_byte() -> None:
    old = torch.zeros(4000, dtype=torch.uint8)
    for places in ([0], [1999], [254], [255], [256], [0, 255, 510, 511, 1999], [509, 510, 1021]):
        new = old.clone()
        new.view(torch.int16)[places] = torch.arange(1, len(places) + 1, dtype=torch.int16)
        changes, count = encode(new, old, 2)
        assert changes is not None and count == len(places)
        got = decode(changes, 4000, 2, count).view(torch.int16)
        assert torch.equal(torch.where(got == -1, 0, got), new.view(torch.int16))


def test_a_delta_as_large_as_the_bucket_is_none() -> None:
    old = torch.zeros(4000, dtype=torch.uint8)
    assert encode(old + 1, old, 2) == (None, 2000)


class Fused(nn.Module):
    """Parameters in SGLang's forms: stacked rows, some of the columns, transposed, joined, in another dtype."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.qkv = nn.Parameter(torch.zeros(12, 8, dtype=torch.bfloat16), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16), requires_grad=False)
        self.expert = nn.Parameter(torch.zeros(2, 6, 8, dtype=torch.bfloat16), requires_grad=False)
        self.joined = nn.Parameter(torch.zeros(10, 8, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("odd", torch.zeros(3))

    def load_weights(self, named: list[tuple[str, Tensor]]) -> None:
        given = dict(named)
        for i, name in enumerate("qkv"):
            self.qkv.data.narrow(0, 4 * i, 4).copy_(given[name][4 * self.rank : 4 * self.rank + 4])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.down.data.copy_, given["down"].narrow(1, 6 * self.rank, 6)).result()
        for i in range(2):
            staged = torch.empty(6, 8, dtype=torch.bfloat16)
            staged.copy_(given[f"expert{i}"].T.contiguous())
            self.expert.data[i] = staged
        default = self.joined.data
        default.copy_(torch.cat([given["up"], given["rope"]]))
        self.bias.copy_(given["bias"])
        self.odd.copy_(given["odd"])  # from bfloat16 to float32


SHAPES = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "down": (8, 12), "expert0": (8, 6), "expert1": (8, 6)}
SHAPES |= {"up": (6, 8), "rope": (4, 8), "bias": (4,), "odd": (3,)}


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_and_sharded_parameters_get_the_bits_of_a_whole_load(rank: int) -> None:
    torch.manual_seed(rank)
    dtypes = {"bias": torch.float32} if rank else {}  # a bucket of both sizes ends with half a unit
    metas = [TensorMeta(name, shape, dtypes.get(name, torch.bfloat16), 0) for name, shape in SHAPES.items()]
    (bucket,) = plan_buckets(metas, 1 << 20)
    state, engine, reference = DeltaState(1000), Fused(rank), Fused(rank)
    flat = torch.randn(bucket.nbytes // 2).to(torch.bfloat16).view(torch.uint8)
    previous: str | None = None
    deltas = 0
    for step in range(50):
        now = Transition(previous, str(step))
        state.begin(now, again=False)
        apply(engine, engine.load_weights, [(state.message("open").text(), flat[:0])])
        message, changes = state.changes(bucket, flat)
        if changes is None:
            engine.load_weights(bucket.views(flat))
        elif message.changed:
            load(engine, [(message.text(), changes)])
            deltas += 1
        state.sent(bucket, flat)
        apply(engine, engine.load_weights, [(state.message("close").text(), flat[:0])])
        reference.load_weights(bucket.views(flat))
        for name, tensor in reference.state_dict().items():
            assert torch.equal(bits(engine.state_dict()[name]), bits(tensor)), (step, name)
        state.commit()
        previous = str(step)
        weights = flat.view(torch.bfloat16)
        where = torch.rand(weights.shape) < 0.05
        weights[where] = torch.where(
            torch.rand(int(where.sum())) < 0.2, -weights[where], torch.randn(int(where.sum()))
        ).to(torch.bfloat16)
        if step == 20:
            weights[7] = torch.nan  # a bucket with NaN is sent as a whole
        if step == 21:
            weights[7] = 1.0
        if step == 30:
            weights[11], weights[12] = 0.0, -0.0
    assert deltas >= 45


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_model_without_the_base_version_refuses() -> None:
    engine, empty = Fused(0), torch.empty(0, dtype=torch.uint8)

    def send(step: Any, base: str | None, version: str) -> None:
        load(engine, [(DeltaMessage(step, base, version).text(), empty)])

    with pytest.raises(ValueError, match="needs weights a, and this engine has None"):
        send("open", "a", "b")
    with pytest.raises(ValueError, match="close"):
        send("close", None, "a")
    send("open", None, "a")
    with pytest.raises(ValueError, match="bucket"):
        send("bucket", "a", "b")
    send("close", None, "a")
    with pytest.raises(ValueError, match="needs weights b, and this engine has a"):
        send("open", "b", "c")
    send("open", "a", "b")
    with pytest.raises(ValueError, match="open"):  # an update that was not closed sets no version
        send("open", "a", "b")


class Served:
    """A transformers engine in threads of this process. `restart` gives it another model, without synced weights."""

    def __init__(self, model: str, other: str) -> None:
        self._models = (model, other)
        self.server = Server(0, KEY, {})
        self.restart(0)
        self.url = f"http://127.0.0.1:{self.server.port}"

    def restart(self, model: int) -> None:
        self.worker = Worker(self._models[model], torch.float32, "cpu", 8)
        self.server.routes = Endpoints(self.worker, 64).routes


@pytest.fixture
def served(tiny_models: TinyModels) -> Iterator[Served]:
    made = Served(str(tiny_models("mixtral")), str(tiny_models("mixtral", seed=1)))
    yield made
    made.server.close()


def step(exporter: FileExporter, share: float) -> None:
    for tensor in exporter.tensors.values():
        where = torch.rand(tensor.shape) < share
        tensor[where] += torch.randn(int(where.sum()))


def test_fifty_syncs_with_restarts_failures_and_joins(
    served: Served, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    exporter = FileExporter(tiny_models("mixtral", seed=2))
    cfg = SyncConfig(transport="http", timeout_s=60.0, bucket_mib=1, delta=DeltaSyncConfig(full_every=8))
    kinds: list[bool] = []
    real = Http.send_delta

    def fail(self: Http, message: DeltaMessage, changes: Tensor) -> None:
        if message.step == "bucket":
            raise OSError("the network is gone")
        real(self, message, changes)

    since_full = must_be_full = 0
    with closing(WeightSync(exporter, [served.url], cfg, access=Access(KEY))) as sync:
        for number in range(50):
            event = (
                rng.choice(["restart", "resync", "unseen restart", "failure", "flush", *[""] * 12]) if number else ""
            )
            if event.endswith("restart"):
                served.restart(number % 2)
                must_be_full = True
                if event == "restart":
                    sync.mark_restarted([served.url])
            if event == "resync":
                served.restart(number % 2)
                again = sync.resync(served.url)
                assert again.verified and again.hops.network_bytes == again.bytes
                check(served, exporter)
            step(exporter, 0.02)
            if event == "failure" and kinds and not must_be_full and since_full + 1 < 8:
                with monkeypatch.context() as patch, pytest.raises(SyncError, match="network is gone"):
                    patch.setattr(Http, "send_delta", fail)
                    sync.update_weights("lost")
                must_be_full = True
            report = sync.update_weights(str(number), verify=True)
            check(served, exporter)
            is_full = report.hops.compared == 0
            assert is_full == (must_be_full or not kinds or since_full + 1 >= 8), (number, event)
            share = report.metrics().get("sync/changed_share", 1.0)
            assert share == 1.0 if is_full else 0.015 < share < 0.025
            assert report.hops.network_bytes < (report.bytes * 0.05 if not is_full else report.bytes + 1)
            since_full, must_be_full = 0 if is_full else since_full + 1, False
            kinds.append(is_full)
    assert 8 <= sum(kinds) < 25


def check(served: Served, exporter: FileExporter) -> None:
    """Checks that the engine's tensors equal the exporter's bit for bit."""
    places = served.worker._weights._places
    assert all(torch.equal(bits(places[name]), bits(tensor)) for name, tensor in exporter.tensors.items())


def test_the_first_delta_is_verified_whatever_the_setting(served: Served, tiny_models: TinyModels) -> None:
    exporter = FileExporter(tiny_models("mixtral", seed=2))
    cfg = SyncConfig(transport="http", verify="off", delta=DeltaSyncConfig())
    with closing(WeightSync(exporter, [served.url], cfg, access=Access(KEY))) as sync:
        verified = []
        for number in range(3):
            step(exporter, 0.02)
            verified.append(sync.update_weights(str(number)).verified > 0)
    assert verified == [False, True, False]


def test_where_most_elements_changed_the_bucket_goes_whole(served: Served, tiny_models: TinyModels) -> None:
    exporter = FileExporter(tiny_models("mixtral", seed=2))
    cfg = SyncConfig(transport="http", delta=DeltaSyncConfig())
    with closing(WeightSync(exporter, [served.url], cfg, access=Access(KEY))) as sync:
        sync.update_weights("0")
        step(exporter, 1.0)
        report = sync.update_weights("1")
        assert report.hops.network_bytes == report.bytes
        assert report.metrics()["sync/changed_share"] > 0.99
        assert sync.update_weights("2").hops.network_bytes == 0
        check(served, exporter)


def test_an_engine_without_the_loader_is_named(
    served: Served, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Endpoints.server_info
    monkeypatch.setattr(Endpoints, "server_info", lambda self, body: real(self, body) | {"custom_weight_loader": None})
    served.restart(0)
    cfg = SyncConfig(transport="http", delta=DeltaSyncConfig())
    exporter = FileExporter(tiny_models("mixtral", seed=2))
    with closing(WeightSync(exporter, [served.url], cfg, access=Access(KEY))) as sync:
        with pytest.raises(SyncError, match=f"{served.url} cannot load .* --custom-weight-loader mrl.inference.delta"):
            sync.update_weights("0")


def test_a_transport_through_memory_is_refused(served: Served, tiny_models: TinyModels) -> None:
    cfg = SyncConfig(transport="shared_memory", delta=DeltaSyncConfig())
    exporter = FileExporter(tiny_models("mixtral", seed=2))
    with closing(WeightSync(exporter, [served.url], cfg, access=Access(KEY))) as sync:
        with pytest.raises(SyncError, match="supports sync.transport http and distributed, not shared_memory"):
            sync.update_weights("0")
