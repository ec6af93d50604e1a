"""Engines on the GPUs that they are given, and started before or after the models that may be there. The machine's
GPUs are made up; the engines are processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mrl import platform
from mrl.config import placement
from mrl.config.derived import Machine
from mrl.config.engines import ENGINES, EngineKind
from mrl.config.schema import PlacementConfig, RolloutConfig, SyncConfig
from mrl.config.sections.models import ActorConfig
from mrl.rollout.errors import EngineUnavailable
from mrl.rollout.launch import CPU, ServerSpec
from mrl.rollout.sglang.command import sglang_launch
from mrl.rollout.transformers_engine.command import transformers_launch
from mrl.trainers.rl import main_parts
from mrl.trainers.shared.heartbeat import Activity
from tests.conftest import TinyModels

FOUR = Machine(2, 2, gpus=4)


@pytest.fixture(autouse=True)
def no_gpus_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_WORLD_SIZE", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"):
        monkeypatch.delenv(name, raising=False)


def spec(rollout: RolloutConfig, machine: Machine, index: int = 0, folder: Path = Path()) -> ServerSpec:
    return ServerSpec(rollout, "model", "bfloat16", 8000, index, 0, machine, folder)


@pytest.mark.parametrize(
    ("named", "visible"),
    [
        (None, ["3,1,0,2", "0,2,1,3"]),
        ("4,5,6,7", ["7,5,4,6", "4,6,5,7"]),
        ("GPU-a, GPU-b,GPU-c,MIG-d", ["MIG-d,GPU-b,GPU-a,GPU-c", "GPU-a,GPU-c,GPU-b,MIG-d"]),
    ],
)
def test_an_engine_sees_its_own_gpus_first_and_all_others(
    monkeypatch: pytest.MonkeyPatch, named: str | None, visible: list[str]
) -> None:
    """By the names that a scheduler gave them. CUDA IPC reads memory of GPUs that the reader sees, no other's."""
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    rollout = RolloutConfig(servers=2, tensor=2, gpus=(3, 1, 0, 2))
    found = [spec(rollout, FOUR, index).environment()["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert found == visible
    assert spec(rollout, CPU).environment().get("CUDA_VISIBLE_DEVICES") == named
    keeping = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
    assert keeping <= spec(rollout, CPU).environment().keys(), "an engine on a CPU keeps the memory that it frees"
    assert not keeping & spec(rollout, FOUR).environment().keys()


def test_which_gpus_are_shared() -> None:
    shared = placement.shared_gpus
    assert shared(RolloutConfig(servers=2, tensor=2), FOUR) == (0, 1)
    assert shared(RolloutConfig(servers=2, gpus=(3, 1)), FOUR) == (1,)
    assert shared(RolloutConfig(servers=2, gpus=(3, 2)), FOUR) == ()
    assert shared(RolloutConfig(), Machine(8, 8, gpus=1)) == (0,), "each rank is shown one GPU"
    assert shared(RolloutConfig(urls=("http://a:1",)), FOUR) == shared(RolloutConfig(), CPU) == ()


def test_what_is_said_of_it() -> None:
    def notes(machine: Machine, **keys: Any) -> list[str]:
        return list(placement.notes(RolloutConfig(**keys), machine))

    (note,) = notes(FOUR, servers=2, memory_fraction=0.4)
    assert (
        note.startswith("GPU 0, 1: an engine and a trainer rank share it")
        and "0.4 of the memory that models leave free" in note
    )
    assert notes(FOUR, release="cache") == notes(FOUR, gpus=(2,)) == notes(CPU) == []
    assert notes(CPU, gpus=(2,)) == ["rollout.gpus has no effect: this machine has no GPUs"]
    assert notes(FOUR, release="cache", threads=2) == ["rollout.threads has no effect: the engines are on GPUs"]
    assert notes(CPU, threads=2) == []


def test_how_an_engine_that_releases_memory_is_started(
    monkeypatch: pytest.MonkeyPatch, tiny_models: TinyModels, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    model = str(tiny_models("llama"))

    def launch(machine: Machine = FOUR, **keys: Any) -> Any:
        return sglang_launch(replace(spec(RolloutConfig(**keys), machine, folder=tmp_path), model_path=model))

    plain, apart = launch(), launch(gpus=(3,))
    assert "--enable-memory-saver" not in plain.command and "PYTORCH_CUDA_ALLOC_CONF" in plain.env
    assert plain.env["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    assert "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK" not in apart.env
    found = {"sglang": object(), "torch_memory_saver": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found.get(name))
    with pytest.raises(EngineUnavailable, match="rollout.release = all needs the package torch_memory_saver"):
        launch(release="all")
    found["torch_memory_saver"] = object()
    releasing = launch(release="all")
    assert "--enable-memory-saver" in releasing.command and "PYTORCH_CUDA_ALLOC_CONF" not in releasing.env
    assert "--enable-weights-cpu-backup" not in releasing.command, "a push brings the weights back"
    assert "--enable-memory-saver" not in launch(CPU, release="all").command
    small = replace(spec(RolloutConfig(gpus=(2,)), FOUR), model_path=model)
    assert transformers_launch(small).env["CUDA_VISIBLE_DEVICES"] == "2,0,1,3"


@contextlib.contextmanager
def the_main_parts(
    monkeypatch: pytest.MonkeyPatch, model: Path, folder: Path, gpus: int, given: tuple[int, ...] | None
) -> Iterator[main_parts.MainParts]:
    """Of a world of one, on a machine that says it has so many GPUs, with an engine that does not care."""
    monkeypatch.setattr(platform, "gpu_count", lambda: gpus)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(main_parts, "RewardManager", lambda *parts, **keys: contextlib.ExitStack())
    monkeypatch.setattr(main_parts, "make_generator", lambda *parts: SimpleNamespace(notes=lambda: []))
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
    )
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
    """It sizes its cache by what it finds free; where it has its GPUs to itself, or none, both start at once."""
    with the_main_parts(monkeypatch, tiny_models("llama"), tmp_path, gpus, given) as main:
        main.start()
        assert (main.engine is None) == waits
        if gpus != 1:
            return
        engines = main.ready()
        assert main.engine is not None and main.engine.urls == engines.urls and engines.access.ours
        assert main.engine.client(engines.urls[0]).model_info().model_type == "llama"
