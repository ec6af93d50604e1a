"""Engines on their assigned GPUs. The GPUs are simulated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrl.config import placement
from mrl.config.derived import Machine
from mrl.config.schema import RolloutConfig
from mrl.inference.errors import EngineUnavailable
from mrl.inference.launch import CPU, ServerSpec
from mrl.inference.sglang.command import sglang_launch
from mrl.inference.transformers_engine.command import transformers_launch
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
    """An engine sees its own GPUs first and then all others, under the names that the scheduler gave. CUDA IPC reads
    only memory of GPUs that the reading process sees."""
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
