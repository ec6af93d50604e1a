"""Engines for system tests: all share one real SGLang server."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from mrl.config.schema import RolloutConfig
from mrl.inference.engine import Engine
from mrl.inference.start import start_engine
from tests.conftest import TinyModels
from tests.helpers import engine_fork_servers
from tests.helpers.served import DELTAS


def pytest_configure() -> None:
    """Starts the fork servers of engines for this process and all its children."""
    engine_fork_servers.start()


@pytest.fixture(scope="session")
def shared_sglang(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Starts one real server with `tiny_models("llama")`, for `sglang_engine`."""
    if importlib.util.find_spec("sglang") is None:  # only the server can import sglang
        pytest.skip("the engine tests need sglang")
    logs = tmp_path_factory.mktemp("sglang_logs")
    with start_engine(RolloutConfig(server_args=DELTAS), str(tiny_models("llama")), "float32", logs) as engine:
        engine.wait_ready()
        yield engine


@pytest.fixture(scope="module")
def sglang_engine(shared_sglang: Engine, tiny_models: TinyModels) -> Iterator[Engine]:
    """Returns a ready Engine on one real server. Each file starts with the weights of `tiny_models("llama")`; a test
    that syncs other weights must restore them for the rest of its file."""
    yield shared_sglang
    for url in shared_sglang.urls:
        client = shared_sglang.pool.client(url)
        client.flush_when_idle(60.0)  # a request that has just been answered still counts as running
        client.update_weights_from_disk(str(tiny_models("llama")), weight_version="default")
