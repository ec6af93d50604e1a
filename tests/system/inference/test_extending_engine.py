"""The recipe "An engine" of docs/extending.md: one file and one line in a table."""

from __future__ import annotations

import ast
from contextlib import closing
from pathlib import Path

import pytest

from mrl import inference
from mrl.config.engines import ENGINES, EngineKind
from mrl.config.loader import load
from mrl.config.problems import ConfigError
from mrl.config.schema import RLConfig, RolloutConfig, SyncConfig
from mrl.core import SamplingParams
from mrl.inference import protocol
from mrl.inference.errors import EngineError
from mrl.inference.launch import launcher
from mrl.inference.start import start_engine
from mrl.weights.sync.weight_sync import WeightSync
from tests.conftest import TinyModels
from tests.helpers.sync_tools import FileExporter
from tests.helpers.train_tools import write_config
from tests.system.inference.test_rollout_engines import requests

IGNORED = ("tensor", "memory_fraction", "server_args")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the line to the table."""
    monkeypatch.setitem(ENGINES, "echo", EngineKind("tests.helpers.echo_engine:echo_launch", ignores=IGNORED))


def test_an_engine_of_one_s_own_samples_and_gets_weights(table: None, tiny_models: TinyModels, tmp_path: Path) -> None:
    model = tiny_models("llama")
    cfg = RolloutConfig(engine="echo", servers=2)
    with start_engine(cfg, str(model), "float32", tmp_path) as engine:
        engine.wait_ready()
        assert engine.pool.notes == []
        asked = requests([(3 + n, 4, 5) for n in range(80)])
        samples = engine.generate(asked, SamplingParams(max_new_tokens=2))
        assert [sample.response_ids.tolist() for sample in samples] == [[5, 4]] * len(asked)
        assert {sample.weight_version for sample in samples} == {"default"}
        loads, waiting = engine.take_loads()
        assert list(loads) == list(engine.urls) and all(load.samples and load.tokens_per_s for load in loads.values())
        assert sum(load.samples for load in loads.values()) == sum(load.requests for load in loads.values()) == 80
        assert sum(load.tokens for load in loads.values()) == 160 and waiting.requests == 80
        sync = SyncConfig(transport="disk", timeout_s=60.0)
        with closing(WeightSync(FileExporter(model), engine.urls, sync, access=engine.pool.access)) as weights:
            assert weights.update_weights("7").tensors > 0
        engine.has_synced("7")  # from now on samples of other weights are refused
        assert {sample.weight_version for sample in engine.generate(asked, SamplingParams())} == {"7"}
        with pytest.raises(EngineError, match="update_weights_from_disk: HTTP 400: .* has no weights"):
            engine.pool.client(engine.urls[0]).update_weights_from_disk(str(tmp_path), weight_version="8")
        assert all(not process.log.read_text().count("Traceback") for process in engine.pool.processes)


def test_its_name_and_what_it_ignores_are_known_to_the_configuration(
    table: None, tiny_models: TinyModels, tmp_path: Path
) -> None:
    file = write_config(tmp_path, tiny_models("llama"), rollout={"engine": "echo", "sampling": {"max_new_tokens": 4}})
    cfg = load(file, gpus=0)
    assert isinstance(cfg, RLConfig) and cfg.rollout.engine == "echo"
    with pytest.raises(ConfigError, match=r"rollout.tensor.*no effect.*the engine is echo") as caught:
        load(file, ["rollout.tensor=2"], gpus=0)
    assert len(caught.value.problems) == 1
    with pytest.raises(ConfigError, match="must be one of sglang, transformers, echo, got 'ecko' .*mean echo"):
        load(file, ["rollout.engine=ecko"], gpus=0)


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_of_the_table_can_be_launched(name: str) -> None:
    assert callable(launcher(name))
    assert set(ENGINES[name].ignores) <= RolloutConfig.model_fields.keys()


def test_the_urls_of_an_engine_are_written_in_one_file() -> None:
    paths = {endpoint.path for endpoint in vars(protocol).values() if isinstance(endpoint, protocol.Endpoint)}
    assert len(paths) == 20
    rooms = [Path(inference.__file__).parents[1] / room for room in ("inference", "weights", "trainers")]
    found = {
        (file.name, node.value)
        for room in rooms
        for file in room.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(tuple(paths))
    }
    assert found == set()


def test_an_engine_that_is_in_no_table() -> None:
    with pytest.raises(ValueError, match="'sglang' or 'transformers'"):
        RolloutConfig(engine="vllm")
