"""Weights pushed into mrl's own transformers engine, which speaks the same protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from mrl.config.schema import RolloutConfig, SyncConfig
from mrl.rollout import Engine, start_engine
from mrl.weights.errors import SyncError
from mrl.weights.sync.push import WeightSync
from tests.sync_tools import FileExporter

SETTINGS: dict[str, dict[str, Any]] = {"qwen2": {"tied": True, "vocab_size": 301}, "mixtral": {}}


@pytest.fixture(scope="module", params=SETTINGS)
def served(request: pytest.FixtureRequest, tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    old, new = (tiny_models(request.param, seed=seed, **SETTINGS[request.param]) for seed in (0, 1))
    logs = tmp_path_factory.mktemp("logs")
    with start_engine(RolloutConfig(engine="transformers"), str(old), "float32", logs) as engine:
        engine.wait_ready()
        yield engine, old, FileExporter(new)


def make(engine: Engine, exporter: FileExporter, transport: str) -> WeightSync:
    cfg = SyncConfig(transport=transport, verify="checksum", timeout_s=60.0, bucket_mib=1)  # type: ignore[arg-type]
    return WeightSync(exporter, engine.urls, cfg, access=engine.access)


def test_every_transport_of_this_engine(served: Any) -> None:
    engine, old, exporter = served
    client = engine.client(engine.urls[0])
    for transport in ("shared_memory", "http", "disk"):
        client.update_weights_from_disk(str(old), weight_version="old")
        before = client.weights_checksum()
        with closing(make(engine, exporter, transport)) as sync:
            report = sync.push(f"v-{transport}")
        assert report.verified == report.tensors == len(exporter.tensors)
        assert client.weights_checksum() != before
        assert client.model_info().weight_version == f"v-{transport}"


def test_a_transport_it_does_not_speak_is_an_error(served: Any) -> None:
    engine, _, exporter = served
    with closing(make(engine, exporter, "distributed")) as sync:
        with pytest.raises(SyncError, match="preparing to send failed: .*/init_weights_update_group: HTTP 404"):
            sync.push("1")
    with closing(make(engine, exporter, "http")) as sync:
        assert sync.push("2").verified == len(exporter.tensors)
