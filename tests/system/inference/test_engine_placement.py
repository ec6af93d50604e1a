"""Order of start: engines start before or after models that may share their GPUs. The GPUs are simulated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mrl import platform
from mrl.config.engines import ENGINES, EngineKind
from mrl.config.schema import PlacementConfig, RolloutConfig, SyncConfig
from mrl.config.sections.models import ActorConfig
from mrl.trainers.rl import main_parts
from mrl.trainers.shared.heartbeat import Activity
from tests.conftest import TinyModels


@pytest.fixture(autouse=True)
def no_gpus_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"):
        monkeypatch.delenv(name, raising=False)


@contextlib.contextmanager
def the_main_parts(
    monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path, gpus: int, given: tuple[int, ...] | None
) -> Iterator[main_parts.MainParts]:
    """Returns the main parts of a world of one, on a machine that reports `gpus` GPUs, with a toy engine."""
    monkeypatch.setattr(platform, "gpu_count", lambda: gpus)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(main_parts, "RewardManager", lambda *parts, **keys: contextlib.ExitStack())
    generator = SimpleNamespace(notes=lambda: [], open_scheduler=print)
    monkeypatch.setattr(main_parts, "make_generator", lambda *parts: generator)
    monkeypatch.setattr(main_parts, "model_notes", lambda cfg: [])
    monkeypatch.setitem(ENGINES, "echo", EngineKind("tests.helpers.echo_engine:echo_launch"))
    data = SimpleNamespace(max_prompt_tokens=8, prompt_key="prompt", answer_key="answer", data_source_key="data_source")
    cfg: Any = SimpleNamespace(
        actor=ActorConfig(),
        rollout=RolloutConfig(engine="echo", gpus=given),
        sync=SyncConfig(),
        placement=PlacementConfig(),
        reward=None,
        data=data,
        model=SimpleNamespace(path=str(model), dtype="float32"),
        run=SimpleNamespace(seed=0),
        agent=None,
        engines=lambda: (cfg.rollout, cfg.sync),
        teachers=dict,
    )
    cfg.policies = [cfg]
    with contextlib.ExitStack() as stack:
        notes: list[str] = []
        recorder, world = SimpleNamespace(note=notes.append), SimpleNamespace(activity=Activity(99.0))
        setup: Any = SimpleNamespace(stack=stack, run_dir=folder, recorder=recorder, world=world)
        yield main_parts.MainParts(cfg, setup)


@pytest.mark.parametrize(
    ("gpus", "given", "waits"), [(0, None, False), (1, None, True), (2, None, True), (2, (1,), False)]
)
def test_an_engine_waits_for_the_models_on_its_gpus(
    monkeypatch: pytest.MonkeyPatch, tiny_models: TinyModels, tmp_path: Path, gpus: int, given: Any, waits: bool
) -> None:
    """An engine waits for models on its GPUs, because it sizes its cache by the free memory. With GPUs of its own, or
    with none, both start at once."""
    with the_main_parts(monkeypatch, tiny_models("llama"), tmp_path, gpus, given) as main:
        main.start()
        assert (main.engine is None) == waits
        if gpus != 1:
            return
        engines = main.ready()
        assert main.engine is not None and main.engine.urls == engines.urls and engines.access.ours
        assert main.engine.pool.client(engines.urls[0]).model_info().model_type == "llama"
