"""Parts of the weight sync that need no engine: buckets, payloads, the engine's layout, checksums."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mrl.families import load_arch
from mrl.inference.protocol import RankChecksums
from mrl.inference.server_info import read_server_info
from mrl.inference.transformers_engine.server import Endpoints
from mrl.inference.transformers_engine.weights import tensor_checksum
from mrl.weights.errors import WeightError
from mrl.weights.meta import TensorMeta
from mrl.weights.sync import transports
from mrl.weights.sync.checksum import ParamHash, Sha256Hash, StreamHasher, TileHash
from mrl.weights.sync.engine_params import EngineLayout, EngineParam, TensorShard, engine_params
from mrl.weights.sync.filler import BucketFiller
from mrl.weights.sync.payload import Bucket, SharedBuffer, plan_buckets
from mrl.weights.sync.transports import Deadline, Engines, SenderLocation, resolve
from mrl.weights.sync.transports.background import InBackground
from mrl.weights.sync.transports.disk import Disk
from mrl.weights.sync.transports.http import Http
from mrl.weights.sync.transports.multi_node import MultiNodeTransport
from mrl.weights.sync.verify import Verifier, hash_kind
from tests.helpers.sync_tools import FileExporter


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32, sender: int = 0) -> TensorMeta:
    return TensorMeta(name, shape, dtype, sender)


def test_buckets_keep_order_and_bound_and_a_large_tensor_travels_alone() -> None:
    metas = [meta("a", 10), meta("b", 10), meta("c", 10), meta("large", 100), meta("d", 5)]
    buckets = plan_buckets(metas, limit=100)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["a", "b"], ["c"], ["large"], ["d"]]
    assert [bucket.nbytes for bucket in buckets] == [80, 40, 400, 20]


def test_tensors_that_an_engine_takes_at_once_only_are_in_one_bucket() -> None:
    metas = [meta("a", 10), meta("half", 10), meta("b", 10), meta("other half", 10), meta("c", 10)]
    buckets = plan_buckets(metas, 40, {"half": "whole", "other half": "whole"})
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [["a"], ["half", "b", "other half"], ["c"]]


def test_buckets_have_no_gaps_and_no_misaligned_tensor() -> None:
    metas = [meta("a", 3, dtype=torch.bfloat16), meta("b", 4), meta("c", 2, dtype=torch.bfloat16), meta("d", 4)]
    for bucket in plan_buckets(metas, limit=1000):
        end = 0
        for slot in bucket.slots:
            assert slot.start == end and slot.start % slot.dtype.itemsize == 0
            end = slot.end


class Held(Http):
    """A transport that delivers a bucket once the next one is being filled. It has no engines."""

    def __init__(self) -> None:
        super().__init__(Engines((), 1, Deadline(20.0)), SenderLocation(0, torch.device("cpu"), None))
        self.begun = [threading.Event() for _ in range(9)]
        self.delivered: list[float] = []

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        number = int(bucket.slots[0].name)
        assert self.begun[number + 1].wait(60.0), f"nobody filled bucket {number + 1} while {number} was on its way"
        self.delivered.append(float(bucket.views(flat)[0][1][0]))


def test_a_bucket_is_filled_while_the_one_before_it_is_on_its_way() -> None:
    plan = plan_buckets([meta(str(number), 4) for number in range(8)], limit=16)
    transport = Held()
    transport.prepare(plan)
    filler = BucketFiller(transport, plan, None)
    for number in range(8):
        transport.begun[number].set()
        filler.add(str(number), torch.full((4,), float(number)))
    transport.begun[8].set()
    filler.delivered()
    assert transport.delivered == [float(number) for number in range(8)]


def test_what_goes_wrong_on_the_way_is_raised_with_the_next_bucket_or_at_the_end() -> None:
    plan = plan_buckets([meta("0", 4)], limit=16)
    transport = Held()
    transport.begun[1].wait = lambda timeout: False  # type: ignore[method-assign]
    transport.prepare(plan)
    filler = BucketFiller(transport, plan, None)
    filler.add("0", torch.zeros(4))
    with pytest.raises(AssertionError, match="nobody filled bucket 1"):
        filler.delivered()
    filler.delivered()


def shared_files() -> set[str]:
    """Returns this process's shared-memory files, recognized by torch's naming."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}


def test_shared_buffers_leave_nothing_behind() -> None:
    before = shared_files()
    buffer = SharedBuffer(1 << 12)
    (bucket,) = plan_buckets([meta("a", 4)], limit=1 << 12)
    buffer.pickle(bucket, readers=0)
    assert len(shared_files() - before) == 1
    del buffer
    assert shared_files() == before


def slow_gpu_hash(raw: bytes) -> str:
    """Computes the GPU kernel's hash one word at a time."""
    m32, m64 = (1 << 32) - 1, (1 << 64) - 1

    def fmix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & m32
        x ^= x >> 13
        x = x * 0xC2B2AE35 & m32
        return x ^ x >> 16

    raw += bytes(-len(raw) % 4)
    words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
    seed1, seed2 = 0x243F6A88, (0x243F6A88 * 0x9E3779B1) & m32 ^ 0xDEADBEEF
    total = 0
    for start in range(0, len(words), 8192):
        h1 = h2 = 0
        for i in range(start, min(start + 8192, len(words))):
            h1 += fmix(words[i] ^ (i * 0x27D4EB2D + seed1 & m32) ^ (i << 15 | i >> 17) & m32)
            h2 += fmix(words[i] ^ (i * 0x165667B1 + seed2 & m32) ^ (i << 13 | i >> 19) & m32)
        size = len(words) * 4
        total += fmix(h1 & m32 ^ size) << 32 | fmix(h2 & m32 ^ size)
    x = total & m64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & m64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & m64
    return f"{x ^ x >> 31:016x}"


PIECES = [torch.randn(30, 500), torch.randn(20, 500), torch.randn(7, 500)]
WHOLE = torch.cat([*PIECES, torch.zeros(3, 500)])
PARAM = EngineParam("fused", tuple(TensorShard(f"p{i}", p.nbytes) for i, p in enumerate(PIECES)), padding=3 * 500 * 4)
EXPECTED = {Sha256Hash: tensor_checksum(WHOLE), TileHash: slow_gpu_hash(WHOLE.numpy().tobytes())}


@pytest.mark.parametrize(
    ("answer", "kind"), [({"device": "cuda"}, TileHash), ({"device": "cpu"}, Sha256Hash), ({}, Sha256Hash)]
)
def test_an_engine_hashes_as_its_device_does(answer: dict[str, str], kind: type[ParamHash]) -> None:
    assert hash_kind(read_server_info(answer)) is kind


def test_the_transformers_engine_hashes_bytes_on_a_gpu_too() -> None:
    worker: Any = SimpleNamespace(device="cuda", model=SimpleNamespace(dtype=torch.float32), routed=None)
    info = read_server_info(Endpoints.server_info(SimpleNamespace(_worker=worker), {}))  # type: ignore[arg-type]
    assert info.device == "cuda" and hash_kind(info) is Sha256Hash


@pytest.mark.parametrize("kind", [Sha256Hash, TileHash])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_a_hash_in_parts_is_the_hash_of_the_whole(kind: type[ParamHash], order: tuple[int, ...]) -> None:
    hashing = kind(PARAM)
    for index in order:
        hashing.add(index, PIECES[index])
    assert hashing.hexdigest() == EXPECTED[kind]


@pytest.mark.parametrize("kind", [Sha256Hash, TileHash])
def test_a_hash_of_parts_on_several_ranks_is_the_hash_of_the_whole(kind: type[ParamHash]) -> None:
    senders = {"p0": 3, "p1": 1, "p2": 3}
    key = (0, "fused")
    ranks = {rank: StreamHasher({key: PARAM}, senders, rank, kind) for rank in (1, 3)}
    for index, piece in enumerate(PIECES):
        ranks[senders[f"p{index}"]].add(f"p{index}", piece)
    assert ranks[1].shared() == ranks[3].shared() == [(key, [3, 1])]
    ranks[3].merge(key, ranks[1].state(key))
    assert ranks[3].digests() == {key: EXPECTED[kind]}
    assert ranks[1].digests() == {}


@pytest.mark.parametrize("kind", [Sha256Hash, TileHash])
def test_one_flipped_bit_changes_the_hash(kind: type[ParamHash]) -> None:
    hashing = kind(PARAM)
    for index, piece in enumerate(PIECES):
        raw = piece.clone()
        if index == 1:
            raw.view(torch.int32)[0, 0] ^= 1
        hashing.add(index, raw)
    assert hashing.hexdigest() != EXPECTED[kind]


def test_layout_replicates_kv_heads_when_the_engine_has_more_ranks(tiny_models) -> None:
    """KV heads are replicated if the engine has more ranks. 2 heads of 16 rows over 4 ranks: ranks 0 and 1 hold the
    first head, ranks 2 and 3 the second."""
    exporter = FileExporter(tiny_models("llama"))
    name = "model.layers.0.self_attn.qkv_proj.weight"
    starts = []
    for rank in range(4):
        params, unknown = engine_params(EngineLayout((name,), 4), rank, exporter.metas(), exporter.arch)
        q, k, v = params[name].parts
        assert (q.start, q.size) == (16 * rank, 16) and (v.start, v.size) == (k.start, k.size) and not unknown
        starts.append((k.start, k.size))
    assert starts == [(0, 16), (0, 16), (16, 16), (16, 16)]


def test_layout_pads_the_vocabulary_of_the_last_ranks(tiny_models) -> None:
    arch = replace(load_arch(tiny_models("llama")), vocab_size=130)
    shape = EngineLayout(("model.embed_tokens.weight", "model.layers.0.self_attn.qkv_proj.weight"), 4)
    metas = [meta("model.embed_tokens.weight", 130, 8)]
    params = [engine_params(shape, rank, metas, arch)[0]["model.embed_tokens.weight"] for rank in range(4)]
    assert [(p.parts[0].start, p.parts[0].size, p.padding) for p in params] == [
        (0, 48, 0),
        (48, 48, 0),
        (96, 34, 14 * 8 * 4),
        (130, 0, 48 * 8 * 4),
    ]


def test_verifier_refuses_tensors_that_the_engine_does_not_have(tiny_models) -> None:
    exporter = FileExporter(tiny_models("llama"))
    shape = EngineLayout(("model.norm.weight", "model.layers.0.self_attn.qkv_proj.weight", "model.extra"), 1)
    with pytest.raises(WeightError, match=r"only the engine has \['model.extra'\].*only the trainer has .*lm_head"):
        Verifier(shape, Sha256Hash, exporter.metas(), exporter.arch)


def test_an_engine_that_does_not_speak_of_a_parameter_has_not_proved_it(tiny_models) -> None:
    exporter = FileExporter(tiny_models("llama"))
    names = ("model.norm.weight", "model.embed_tokens.weight")
    metas = [each for each in exporter.metas() if each.name in names]
    verifier = Verifier(EngineLayout(names, 1), Sha256Hash, metas, exporter.arch)
    expected = {(0, name): "aa" for name in names}
    whole = RankChecksums(0, 1, dict.fromkeys(names, "aa"))
    assert verifier.mismatches("http://a:1", expected, [whole]) == []
    for held in ([], [RankChecksums(0, 1, {names[0]: "aa"})], [RankChecksums(1, 2, dict.fromkeys(names, "aa"))]):
        found = verifier.mismatches("http://a:1", expected, held)
        assert any(each.param == names[1] and each.held == "none" and each.rank == 0 for each in found), held


def test_files_that_a_folder_keeps_for_a_while_do_not_end_a_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync does not fail if a folder keeps files for a while, as NFS does with open ones."""
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
    Disk(Engines((), 1, Deadline(20.0)), SenderLocation(0, torch.device("cpu"), tmp_path)).release(failed=False)
    assert tmp_path.is_dir()


def test_a_late_file_of_a_failed_sync_is_not_in_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that a hung disk delays beyond its sync does not replace a file of the next sync."""
    place, loaded = SenderLocation(0, torch.device("cpu"), tmp_path), []
    engine = SimpleNamespace(
        flush_when_idle=lambda limit: None,
        update_weights_from_disk=lambda path, **how: loaded.extend(
            float(load_file(file)["a"]) for file in Path(path).glob("*.safetensors")
        ),
    )
    disk, (bucket,) = Disk(Engines((engine,), 1, Deadline(20.0)), place), plan_buckets([meta("a", 1)], 100)  # type: ignore[arg-type]
    hangs, goes_on = threading.Event(), threading.Event()

    def hung(*arguments: Any, **how: Any) -> None:
        hangs.set()
        goes_on.wait(20.0)
        save_file(*arguments, **how)

    disk.prepare([bucket])
    with monkeypatch.context() as patch:
        patch.setattr("mrl.weights.sync.transports.disk.save_file", hung)
        late = InBackground(lambda: disk.send(bucket, torch.tensor([1.0]).view(torch.uint8)))
        assert hangs.wait(20.0)
    disk.release(failed=True)
    disk.prepare([bucket])
    disk.send(bucket, torch.tensor([2.0]).view(torch.uint8))
    goes_on.set()
    assert late.wait(20.0)
    disk.commit("2")
    assert loaded == [2.0]


def test_auto_goes_through_memory_on_one_machine_and_a_group_between_machines() -> None:
    assert resolve("auto", True, None) == "shared_memory"
    assert resolve("auto", False, None) == "distributed"
    for transport in ("shared_memory", "cuda_ipc", "disk"):
        with pytest.raises(WeightError, match=f"{transport} needs the engines and all senders on one machine"):
            resolve(transport, False, None)
    assert resolve("disk", False, Path("/shared")) == "disk"


def test_what_failed_in_a_sender_comes_before_what_came_of_it() -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    def hangs(*_: object) -> None:
        raise WeightError("the engine hangs")

    sender = MultiNodeTransport.__new__(MultiNodeTransport)
    route = SimpleNamespace(
        relays={1: 1}, send_command=lambda word: None, start=lambda part: SimpleNamespace(wait=lost)
    )
    here = SimpleNamespace(engines=SimpleNamespace(clients=["one"]), deliver=hangs)
    sender._mine, sender._here, sender._unannounced = route, here, 1  # type: ignore[assignment]
    (bucket,) = plan_buckets([meta("a", 4)], limit=1 << 20)
    with pytest.raises(WeightError, match="the engine hangs"):
        sender.send(bucket, torch.empty(16, dtype=torch.uint8))


def test_what_may_not_be_needed_is_begun_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def cannot() -> None:
        asked.append(1)
        raise RuntimeError("no room")

    monkeypatch.setattr(transports, "start_manager", cannot)
    transports.begin_early("auto")
    transports.begin_early("shared_memory")
    assert len(asked) == 2
    transports.begin_early("http")
    assert len(asked) == 2
