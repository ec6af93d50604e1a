"""An engine that dies or hangs is restarted, and the run continues with the same results."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.config.schema import RolloutConfig
from mrl.core import Sample, SamplingParams
from mrl.inference.engine import Engine
from mrl.inference.errors import RolloutError
from mrl.inference.start import start_engine
from mrl.observe import read_metrics
from tests.conftest import TinyModels
from tests.helpers.train_tools import Train, write_config
from tests.system.inference.test_rollout_engines import requests
from tests.system.inference.test_rollout_failures import descendants

pytestmark = pytest.mark.long

ASKED = requests([(5, 6, 7 + i) for i in range(96)])
SAMPLING = SamplingParams(max_new_tokens=60, temperature=1.0)
CONFIG = RolloutConfig(engine="transformers", servers=2, concurrent_requests=16, max_restarts=2)


class Trainer:
    """Gives an engine the weights of `model`. For each of `deaths` it first kills the engine."""

    def __init__(self, engine: Engine, model: Path, deaths: int = 0) -> None:
        self.engine, self.model, self.deaths = engine, model, deaths
        self.notes: list[str] = []
        engine.pool.restarts.allow(self.notes.append, self.give_weights)

    def give_weights(self, url: str) -> None:
        if self.deaths:
            self.deaths -= 1
            kill(self.engine, url)
        self.engine.pool.client(url).update_weights_from_disk(str(self.model), weight_version="pushed")


def kill(engine: Engine, url: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Kills the engine's process; its supervisor stays."""
    (process,) = (process for process in engine.pool.processes if process.url == url)
    for pid in descendants(process.pid)[1:]:
        os.kill(pid, number)


def tokens(samples: list[Sample]) -> list[list[int]]:
    return [sample.response_ids.tolist() for sample in samples]


@pytest.fixture(scope="module")
def two(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, list[list[int]]]]:
    """Starts two servers with other weights than they later get; also returns the undisturbed samples."""
    logs, pushed = tmp_path_factory.mktemp("two"), tiny_models("llama", seed=1)
    with start_engine(CONFIG, str(tiny_models("llama")), "float32", logs) as engine:
        engine.wait_ready()
        for url in engine.urls:
            engine.pool.client(url).update_weights_from_disk(str(pushed), weight_version="pushed")
        yield engine, tokens(engine.generate(ASKED, SAMPLING))


@pytest.mark.parametrize(
    ("signals", "deaths"),
    [
        ({1: signal.SIGKILL}, 0),
        pytest.param({0: signal.SIGKILL, 1: signal.SIGKILL}, 0, marks=pytest.mark.slow),
        ({0: signal.SIGSTOP}, 1),
    ],
)
def test_the_samples_are_those_of_an_undisturbed_rollout(
    two: tuple[Engine, list[list[int]]], signals: dict[int, signal.Signals], deaths: int, tiny_models: TinyModels
) -> None:
    """The samples do not change if one of two servers is killed, both are, or one hangs and then dies again before it
    has its weights."""
    engine, undisturbed = two
    engine.pool.restarts.made = 0
    trainer = Trainer(engine, tiny_models("llama", seed=1), deaths)
    engine.dispatcher.request_timeout_s = 15.0 if signal.SIGSTOP in signals.values() else 600.0
    finished: list[int] = []

    def on_samples(samples: list[Sample]) -> None:
        before = len(finished)
        finished.extend(sample.request.sample_id for sample in samples)
        if before < len(ASKED) // 3 <= len(finished):
            for server, number in signals.items():
                kill(engine, engine.urls[server], number)

    samples = engine.generate(ASKED, SAMPLING, on_samples)
    assert tokens(samples) == undisturbed
    assert {sample.weight_version for sample in samples} == {"pushed"}
    assert sorted(finished) == list(range(len(ASKED))), "each sample is finished once"
    assert engine.pool.restarts.made == len(trainer.notes) == len(signals) + deaths
    how = "does not answer" if signal.SIGSTOP in signals.values() else r"ended with exit code 137 (SIGKILL)"
    first = [f"engine {server} {how}: starting it again (restart 1 of 2; " for server in signals]
    assert any(note in trainer.notes[0] for note in first), "whichever is seen first"


def test_when_the_restarts_are_used_up_the_rollout_fails(two: tuple[Engine, Any], tmp_path: Path) -> None:
    engine, _ = two
    engine.pool.restarts.made = 1
    Trainer(engine, tmp_path / "never used", deaths=1)
    kill(engine, engine.urls[0])
    with pytest.raises(RolloutError) as caught:
        engine.generate(ASKED, SAMPLING)
    message = str(caught.value)
    assert "SIGKILL" in message and "rollout.max_restarts = 2 restarts are used up" in message


GRPO: dict[str, Any] = {
    "run": {"steps": 3, "timeout_s": 300.0},
    "actor": {"parallel": {"tensor": 2}, "optimizer": {"lr": 1e-3}},
    "batch": {"prompts_per_step": 8, "samples_per_prompt": 2, "samples_per_minibatch": 8},
    "rollout": {"sampling": {"max_new_tokens": 200}, "concurrent_requests": 16, "request_timeout_s": 120.0},
    "checkpoint": {"export_hf": True},
}


def train(folder: Path, model: Path, rollout: dict[str, Any]) -> Train:
    folder.mkdir()
    config = write_config(folder, model, **GRPO | {"rollout": GRPO["rollout"] | rollout})
    return Train(folder, config)


def rows_of(folder: Path, step: int) -> list[dict[str, Any]]:
    text = (folder / f"runs/run/rollouts/step_{step + 1}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    files = (folder / "runs/run/hf").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def servers(run: Train) -> list[int]:
    """Returns the engines' main processes."""
    lines = run.processes()
    found = [pid for pid, line in lines.items() if "sglang.launch_server" in line and "supervisor.py" not in line]
    return sorted(found)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang")
def test_a_run_whose_engines_are_killed_ends_with_the_weights_of_an_undisturbed_one(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    """Two ranks and two servers: one dies in a rollout, the other between the rollout and the weight sync."""
    model, hurt, whole = tiny_models("llama"), tmp_path / "hurt", tmp_path / "whole"
    with train(hurt, model, {"servers": 2, "max_restarts": 2}) as run:
        run.wait_for("step 1/3", 600)
        first, second = servers(run)
        os.kill(second, signal.SIGKILL)
        wait_for_file(run, hurt / "runs/run/rollouts/step_2.jsonl")
        os.kill(first, signal.SIGKILL)
        assert run.wait(600) == 0, run.terminal
        assert run.left_running() == {}
    assert run.terminal.count("ended with exit code 137 (SIGKILL): starting it again (restart ") == 2, run.terminal
    assert "Traceback" not in run.terminal and "error" not in run.terminal.lower(), run.terminal
    with train(whole, model, {"max_restarts": 0}) as run:
        assert run.wait(600) == 0, run.terminal
    for step in range(3):
        assert rows_of(hurt, step) == rows_of(whole, step), step
        assert {row["weight_version"] for row in rows_of(hurt, step)} == {str(step)}
    ours, theirs = (exported(folder) for folder in (hurt, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [row["rollout/engine_restarts"] for row in read_metrics(hurt / "runs/run")] == [0, 2, 0]


def wait_for_file(run: Train, file: Path) -> None:
    end = time.monotonic() + 600
    while not file.exists():
        assert time.monotonic() < end, run.terminal
        time.sleep(0.01)
