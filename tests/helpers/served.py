"""A served model, and the checks that tests of weight sync share."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mrl.config.schema import DeltaSyncConfig, SyncConfig
from mrl.inference.client import EngineClient
from mrl.inference.delta import LOADER
from mrl.inference.engine import Engine
from mrl.weights.sync.weight_sync import WeightSync
from tests.helpers.sync_tools import FileExporter
from tests.helpers.world import run_world

DELTAS = ("--custom-weight-loader", LOADER)  # command-line arguments of SGLang
TRANSPORTS = ("shared_memory", "http", "distributed", "disk")


@dataclass(frozen=True)
class Served:
    """A server that started with the weights of `old`; `new` is another model of the same shape."""

    engine: Engine
    old: Path
    new: Path
    tensor: int

    @property
    def client(self) -> EngineClient:
        return self.engine.pool.client(self.engine.urls[0], 60.0)

    def hashes(self) -> list[Any]:
        return self.client.weights_checksum()

    def load(self, path: Path) -> list[Any]:
        """Makes the engine load a directory from disk, and returns the engine's checksums."""
        self.client.update_weights_from_disk(str(path), weight_version="old")
        return self.hashes()

    def greedy(self) -> list[int]:
        params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
        return self.client.generate({"input_ids": [5, 17, 99, 200, 42], "sampling_params": params})["output_ids"]

    def sync(self, transport: str = "shared_memory", verify: str = "checksum") -> WeightSync:
        cfg = SyncConfig(transport=transport, verify=verify, timeout_s=60.0, bucket_mib=1)  # type: ignore[arg-type]
        return WeightSync(FileExporter(self.new), self.engine.urls, cfg, self.tensor, access=self.engine.pool.access)


def check_transport(served: Served, transport: str, expected: list[Any]) -> None:
    """Checks that a weight sync gives the engine the same checksums as loading the model's directory from disk."""
    assert served.load(served.old) != expected
    with closing(served.sync(transport)) as sync:
        for version in ("3", "4"):  # the second sync reuses what the first one set up
            report = sync.update_weights(version)
            assert served.hashes() == expected
            assert report.transport == transport
            assert report.verified == report.tensors == len(FileExporter(served.new).tensors)
            assert report.bytes == sum(t.nbytes for t in FileExporter(served.new).tensors.values())
            assert served.client.model_info().weight_version == version
            served.load(served.old)


def check_deltas(served: Served, transport: str) -> None:
    """Checks that delta syncs (changed elements only) give the engine the trainer's bits; each sync is verified."""
    draw = torch.Generator().manual_seed(0)
    exporter, delta = FileExporter(served.new), DeltaSyncConfig(full_every=5)
    cfg = SyncConfig(transport=transport, verify="checksum", timeout_s=60.0, bucket_mib=1, delta=delta)  # type: ignore[arg-type]
    access = served.engine.pool.access
    with closing(WeightSync(exporter, served.engine.urls, cfg, served.tensor, access=access)) as sync:
        for number in range(9):
            if number == 3:  # the engine's weights are not those of the last sync
                served.load(served.old)
            for tensor in exporter.tensors.values():
                where = torch.rand(tensor.shape, generator=draw) < 0.02
                tensor[where] += torch.randn(int(where.sum()), generator=draw).to(tensor.dtype)
            report = sync.update_weights(str(number))
            assert report.verified == report.tensors == len(exporter.tensors)
            is_full = number in (0, 3, 8)
            assert (report.hops.compared == 0) == is_full, number
            assert (
                report.hops.network_bytes == report.bytes
                if is_full
                else 0 < report.hops.network_bytes < 0.05 * report.bytes
            )
        if transport == "http":  # with an engine that does not end, `distributed` would leave a group behind
            sync.resync(served.engine.urls[0])
        assert sync.update_weights("again").hops.network_bytes == 0  # no element has changed


def world(served: Served, layouts: list[dict[str, int]], transports: tuple[str, ...], out: Path) -> list[Any]:
    """Syncs real Megatron models from a world of two ranks, once per (layout, transport)."""
    jobs = [{"layout": layout, "transport": transport} for layout in layouts for transport in transports]
    (out / "jobs.json").write_text(json.dumps({"api_key": served.engine.pool.access.api_key, "jobs": jobs}))
    run_world(2, "sync.py", served.new, served.old, served.engine.urls[0], out / "jobs.json", out / "results")
    return list(zip(jobs, json.loads((out / "results").read_text()), strict=True))


def check_world(served: Served, results: list[Any], expected: list[Any]) -> None:
    hashes = {f"{rank.tp_rank} {name}": digest for rank in expected for name, digest in rank.checksums.items()}
    for job, result in results:
        assert result["before"] != hashes, job
        assert result["after"] == hashes, job
        assert result["verified"] == result["tensors"] == len(FileExporter(served.new).tensors), job
