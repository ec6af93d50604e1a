"""Weight sync to mrl's own transformers engine, which uses the same protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.config.schema import RolloutConfig, SyncConfig
from mrl.inference.engine import Engine
from mrl.inference.start import start_engine
from mrl.inference.transformers_engine.weights import ModelWeights
from mrl.weights.errors import SyncError
from mrl.weights.sync.engine_params import EngineLayout, engine_params
from mrl.weights.sync.weight_sync import WeightSync
from tests.conftest import TinyModels
from tests.helpers.sync_tools import FileExporter
from tests.helpers.tiny import FAMILIES

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
    return WeightSync(exporter, engine.urls, cfg, access=engine.pool.access)


def test_every_transport_of_this_engine(served: Any) -> None:
    engine, old, exporter = served
    client = engine.pool.client(engine.urls[0])
    for transport in ("shared_memory", "http", "disk"):
        client.update_weights_from_disk(str(old), weight_version="old")
        before = client.weights_checksum()
        with closing(make(engine, exporter, transport)) as sync:
            report = sync.update_weights(f"v-{transport}")
        assert report.verified == report.tensors == len(exporter.tensors)
        assert client.weights_checksum() != before
        assert client.model_info().weight_version == f"v-{transport}"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SETTINGS])
def test_what_is_pushed_into_it_is_the_other_model_to_the_bit(family: str, tiny_models: TinyModels) -> None:
    """Weights synced one tensor at a time, under the names of the protocol, equal the other model's bit for bit. Every
    family is tested in this process."""
    ids = torch.tensor([[5, 17, 99, 200, 42, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 19, 20, 21, 22]])
    (old, expected), (new, wanted) = (
        (model, model(ids).logits) for model in (loaded(tiny_models(family, seed=seed)) for seed in (0, 1))
    )
    exporter = FileExporter(tiny_models(family, seed=1))
    held, right = (ModelWeights(model, exporter.arch) for model in (old, new))
    assert held.checksums() != right.checksums() and not torch.equal(expected, wanted)
    for name, tensor in exporter.stream():
        held.load([(name, tensor)])
    assert held.checksums() == right.checksums()
    assert torch.equal(old(ids).logits, wanted)
    shape = EngineLayout(tuple(held.checksums()), 1)
    params, unknown = engine_params(shape, 0, exporter.metas(), exporter.arch)
    assert not unknown and {name for each in params.values() for name in each.sources} == exporter.tensors.keys()


def loaded(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager").eval()
    return model.requires_grad_(False)


def test_a_transport_it_does_not_speak_is_an_error(served: Any) -> None:
    engine, _, exporter = served
    with closing(make(engine, exporter, "distributed")) as sync:
        with pytest.raises(SyncError, match="preparing to send failed: .*/init_weights_update_group: HTTP 404"):
            sync.update_weights("1")
    with closing(make(engine, exporter, "http")) as sync:
        assert sync.update_weights("2").verified == len(exporter.tensors)
