"""Engines that release their memory while the models compute: the run is bitwise the same, also if an engine dies."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.schema import AlgorithmConfig, BatchConfig, RLConfig, RolloutConfig, ValidationConfig
from mrl.config.sections.models import ActorConfig
from mrl.inference.protocol import MemoryPart
from mrl.observe import read_metrics
from mrl.resilience import EXIT_PREEMPTED
from mrl.trainers.rl.memory_order import ORDER, Engines
from mrl.trainers.rl.run import RLRun
from mrl.trainers.shared.memory import AWAKE, PhaseMemoryManager
from mrl.trainers.shared.world import RankZeroError
from tests.conftest import TinyModels
from tests.helpers.bare_run import bare_run
from tests.helpers.train_tools import MEASURED, Train, write_config

RUN_S = 300.0
PPO: dict[str, Any] = {
    "run": {"steps": 3, "nproc": 2, "timeout_s": 120.0},
    "actor": {"parallel": {"tensor": 2}, "optimizer": {"lr": 1e-2}},
    "critic": {"parallel": {"tensor": 2}, "optimizer": {"lr": 1e-2}, "warmup_steps": 1},
    "algorithm": {"adv_estimator": "gae", "kl": {"use_in_reward": True, "coef": 0.05}},
    "rollout": {"engine": "transformers", "sampling": {"max_new_tokens": 16}, "max_restarts": 2},
    "validation": {"every_steps": 2, "prompts": 4},
    "ema": {"decay": 0.5, "in_validation": True},
    "checkpoint": {"every_steps": 3, "export_hf": True},
    "resilience": {"save_deadline_s": 200.0},
}
ALL = {
    "actor": PPO["actor"] | {"offload": "all"},
    "critic": PPO["critic"] | {"offload": "all"},
    "ref": {"offload": "all"},
    "rollout": PPO["rollout"] | {"release": "all"},
}


def start(folder: Path, model: Path, **sections: Any) -> Train:
    """Starts a run, or resumes it if the folder exists."""
    folder.mkdir(exist_ok=True)
    data = {"data": {"validation": str(folder / "validation.jsonl")}}
    return Train(folder, write_config(folder, model, **PPO | data | sections))


def engine(run: Train) -> int:
    return run.pid_of("transformers_engine")


def left(folder: Path) -> dict[str, Any]:
    """Returns the run's samples and metrics."""
    files = sorted((folder / "runs/run/rollouts").glob("*.jsonl"))
    left_out = (*MEASURED, "rollout/engine_restarts")
    rows = [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in read_metrics(folder / "runs/run")]
    return {file.name: file.read_text().splitlines() for file in files} | {"metrics": rows}


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return {key: x for file in (folder / "runs/run" / name).glob("*.safetensors") for key, x in load_file(file).items()}


def wait_for_file(run: Train, file: Path) -> None:
    end = time.monotonic() + RUN_S
    while not file.exists():
        assert time.monotonic() < end, run.terminal
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs without releasing memory: critic warm-up, training of both, validations of actor and average."""
    folder = tmp_path_factory.mktemp("release") / "none"
    with start(folder, tiny_models("llama")) as run:
        assert run.wait(RUN_S) == 0, run.terminal
    return folder


@pytest.mark.slow
def test_a_run_that_gives_everything_up_is_the_same_to_the_bit(
    undisturbed: Path, tiny_models: TinyModels, tmp_path: Path
) -> None:
    """A run that offloads and releases everything is bitwise the same, also if its engine dies meanwhile and a signal
    stops it before it resumes."""
    folder = tmp_path / "all"
    with start(folder, tiny_models("llama"), **ALL) as run:
        wait_for_file(run, folder / "runs/run/rollouts/step_2.jsonl")
        os.kill(engine(run), signal.SIGKILL)
        run.signal(signal.SIGTERM)
        assert run.wait(RUN_S) == EXIT_PREEMPTED, run.terminal
        assert run.left_running() == {}
    assert run.terminal.count("starting it again") == 1 and "Traceback" not in run.terminal
    assert "stopping after step 2 on a signal: step 2 is saved" in run.terminal
    with start(folder, tiny_models("llama"), **ALL) as run:
        assert run.wait(RUN_S) == 0, run.terminal
    ours, theirs = left(folder), left(undisturbed)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] == theirs[name], name
    for name in ("hf", "hf_ema"):
        mine, wanted = weights(folder, name), weights(undisturbed, name)
        assert mine.keys() == wanted.keys() and mine and all(torch.equal(mine[key], wanted[key]) for key in mine)
    rows = read_metrics(folder / "runs/run")
    assert all(row["memory/offloaded_gib"] > 0 and "time/sync" in row for row in rows[1:])
    assert json.loads(ours["step_2.jsonl"][0])["weight_version"] == "0", "warm-up: the same weights, the same name"


class Engine:
    """The engine on rank 0. told: its commands, with weight syncs; losses: how many of the next moves lose its
    weights"""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.losses, self.lacks_weights, self.refuses = 0, False, False

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        self._move("release", parts)
        self.lacks_weights |= "weights" in parts

    def resume_memory(self, parts: Sequence[MemoryPart]) -> None:
        self._move("resume", parts)

    def update_weights(self, version: str, *, verify: bool) -> None:
        self.told.append(f"push {version}")
        self.lacks_weights = False

    def _move(self, what: str, parts: Sequence[MemoryPart]) -> None:
        if self.refuses:
            raise RuntimeError("HTTP 500")
        self.told.append(f"{what} {' '.join(parts)}")
        if self.losses:
            self.losses, self.lacks_weights = self.losses - 1, True


class World:
    """A world of one rank whose sampling returns nothing."""

    def from_main(self, what: str, make: Any, together: Any = None) -> Any:
        if what == "validation":
            return {}
        try:
            return make()
        except Exception as error:
            raise RankZeroError(f"{what} failed: {error}") from error


def run_with(engine: Engine, parts: tuple[MemoryPart, ...], *urls: str) -> RLRun:
    cfg = RLConfig.model_construct(
        actor=ActorConfig(),
        batch=BatchConfig(prompts_per_step=1),
        algorithm=AlgorithmConfig(adv_estimator="grpo"),
        rollout=RolloutConfig(urls=urls, release="all"),
        validation=ValidationConfig(),
    )
    world: Any = World()
    actor: Any = SimpleNamespace()
    run = replace(
        bare_run(cfg, actor, None), world=world, memory=PhaseMemoryManager(ORDER, {}, Engines(world, parts, engine))
    )
    run.sync = engine  # type: ignore[assignment]
    return run


CACHE: tuple[MemoryPart, ...] = ("kv_cache", "cuda_graph")


def test_an_engine_that_was_lost_while_memory_moved_has_its_weights_before_it_samples() -> None:
    """An engine lost while memory moves gets its weights before it generates, also if it is lost again after the
    sync."""
    engine = Engine()
    run = run_with(engine, CACHE)
    run.memory.begin("experience")
    run.sync_weights(7)
    engine.told.clear()
    engine.losses = 2
    run.memory.begin("validation")
    run.validate(7)
    sleep, wake = "release kv_cache cuda_graph", "resume kv_cache cuda_graph"
    assert engine.told == [wake, sleep, "push 7", wake] and not engine.lacks_weights
    engine.told.clear()
    engine.losses = 1
    run.memory.begin("experience")
    engine.losses = 1
    run.memory.begin("validation")
    run.validate(7)
    assert engine.told == [sleep, wake, sleep, "push 7", wake]
    assert run.memory.phase == "validation"


def test_engines_of_others_are_awake_with_the_last_weights_when_a_run_ends() -> None:
    engine = Engine()
    run = run_with(engine, AWAKE, "http://other")
    run.memory.begin("sync")
    run.sync_weights(3)
    run.memory.begin("critic_update")
    engine.told.clear()
    run.release_resources()
    asked = "resume weights kv_cache cuda_graph", "release kv_cache cuda_graph", "push 3", "resume kv_cache cuda_graph"
    assert engine.told == list(asked)
    run.memory.begin("critic_update")
    engine.refuses = True
    notes: list[str] = []
    run.recorder.note = notes.append  # type: ignore[method-assign]
    run.release_resources()
    assert "may be left without memory or weights: resuming the engines' memory failed: HTTP 500" in notes[0]
    mine = run_with(Engine(), AWAKE)
    mine.memory.begin("sync")
    mine.release_resources()
    assert mine.memory.phase == "sync", "engines of the run's own end with it"
