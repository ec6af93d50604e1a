"""Fixtures of the whole session: tiny model directories, and one real SGLang server that all engine tests share."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.config.schema import RolloutConfig
from mrl.imports import importing
from mrl.kernels import native
from mrl.rollout import Engine, start_engine
from tests import engine_fork_servers
from tests.tiny import make_tiny

TinyModels = Callable[..., Path]
LONG = (  # these files first, so that of several workers none ends alone with one
    "cluster", "survival", "trainer_faults", "serve", "resume", "gradients", "engine_families", "engine_restart",
    "overlap", "main_job", "critic", "algorithms", "checkpoint", "vision_rl", "vision_preferences", "under_way",
    "routing_replay", "reward_trainer", "dpo_faults", "slurm_jobs", "vision_models", "weights_worlds", "vision_resume",
    "vision_learning", "lora_runs", "dpo", "diffusion_runs", "sft", "lora", "policy_copies", "memory", "vision_engines",
    "strangers", "spanning", "sync_adapter", "sync_failures", "nonfinite", "ranks", "families", "convert",
    "sync_engine", "rollout_failures", "rollout_engines", "engine_nodes", "agent_endpoint", "agents", "on_gpu",
)  # fmt: skip


def pytest_configure() -> None:
    """A shell starts background jobs with SIGINT ignored, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    engine_fork_servers.start()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """In every worker: all test modules."""
    with importing():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="module", autouse=True)
def no_world_is_left() -> Iterator[None]:
    """A process group that a test leaves behind would fail whichever test of its worker needs one next."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("a test of this file has left its process in a process group")


@pytest.fixture(params=["C", "torch"])
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of a kernel's two forms serves: its name."""
    form: str = request.param
    if form == "torch":
        monkeypatch.setattr(native, "supports_tensors", lambda *tensors: False)
    return form


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """tiny_models(family, tied=False, seed=0, weights=True, **config overrides) -> Hugging Face directory.

    The same arguments give the same directory: do not write into it.
    """
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def get(family: str, **settings: Any) -> Path:
        key = repr((family, sorted(settings.items(), key=lambda item: item[0])))
        if key not in made:
            made[key] = make_tiny(root / f"{family}_{len(made)}", family, **settings)
        return made[key]

    return get


@pytest.fixture(scope="session")
def shared_sglang(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A ready Engine on one real server with `tiny_models("llama")`, for `sglang_engine`."""
    if importlib.util.find_spec("sglang") is None:  # found, not imported: only the server can import it
        pytest.skip("the engine tests need sglang")
    logs = tmp_path_factory.mktemp("sglang_logs")
    with start_engine(RolloutConfig(), str(tiny_models("llama")), "float32", logs) as engine:
        engine.wait_ready()
        yield engine


@pytest.fixture(scope="module")
def sglang_engine(shared_sglang: Engine, tiny_models: TinyModels) -> Iterator[Engine]:
    """A ready Engine on one real server. Each file starts with `tiny_models("llama")`, whatever the one before it has
    pushed; within a file a test that pushes other weights must put those back."""
    yield shared_sglang
    for url in shared_sglang.urls:
        shared_sglang.client(url).update_weights_from_disk(str(tiny_models("llama")), weight_version="default")
