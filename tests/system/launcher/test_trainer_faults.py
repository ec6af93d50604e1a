"""Faults under a running `mrl train`: it ends in bounded time with one error, the cause, and leaves no process."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import TinyModels
from tests.helpers.train_tools import MADE_UP, Train, write_config
from tests.helpers.world import ROOT

pytestmark = pytest.mark.long

FAKE_ENGINE = Path(__file__).parents[2] / "worlds" / "fake_engine.py"
STARTING_S = 240.0  # time to import torch and Megatron in two processes on a busy machine
ENDING_S = 60.0  # from the fault to the exit
LONG = {"sampling": {"max_new_tokens": 450}, "max_running_requests": 64, "request_timeout_s": 120.0}
TWO_RANKS = {"parallel": {"tensor": 2}}

needs_sglang = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang"),
]


@contextmanager
def fake_engine(folder: Path, behaviour: str) -> Iterator[str]:
    port = folder / "port"
    process = subprocess.Popen([sys.executable, "-S", str(FAKE_ENGINE), str(port), behaviour])
    try:
        end = time.monotonic() + 30
        while not port.exists():
            assert time.monotonic() < end and process.poll() is None, "the fake engine did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port.read_text()}"
    finally:
        process.kill()
        process.wait(10)
        port.unlink(missing_ok=True)


def wait_until_it_hangs(run: Train, url: str) -> None:
    """Waits until the run requests samples from a fake engine that never answers."""
    run.wait_for("waiting for the engine", STARTING_S)
    end = time.monotonic() + STARTING_S
    while True:
        with urllib.request.urlopen(f"{url}/calls", timeout=30) as answer:
            if "generate_hangs" in json.load(answer)["calls"]:
                return
        assert time.monotonic() < end, f"no rollout came\n{run.terminal[-4000:]}"
        time.sleep(0.05)


def the_error(run: Train) -> str:
    """Returns the text of the one error on the terminal. Fails if there is another one."""
    parts = run.terminal.split("mrl: error: ")
    assert len(parts) == 2, run.terminal
    assert "Traceback" not in parts[0], run.terminal
    return parts[1]


def details(error: str) -> str:
    """Returns the log that the error names."""
    match = re.search(r"^mrl: details: (.*)$", error, re.MULTILINE)
    assert match, error
    return Path(match[1]).read_text()


# preflight calls the function with a row's own answer, for which it works
REWARD = "def reward(prompt, response, row):\n    return 1 / (response == row['answer'])\n"
# name -> (the fake engine's behaviour, the error). test_sync_failures.py and test_rollout_failures.py have others.
ENGINES = {
    "dies in an update": ("dies", "version 1: sending failed: .*update_weights_from_tensor: no answer"),
    "answers nothing to a rollout": ("generate_hangs", "rollout failed: .*no answer for sample .* = 4 s"),
}


def run_to_its_error(folder: Path, model: Path, behaviour: str, **sections: Any) -> Train:
    with fake_engine(folder, behaviour) as url:
        rollout = {"urls": [url], "sampling": {"max_new_tokens": 4}, "request_timeout_s": 4.0, "mismatch": MADE_UP}
        rollout |= sections.pop("rollout", {})
        config = write_config(folder, model, actor=TWO_RANKS, rollout=rollout, **sections)
        with Train(folder, config, "run.steps=3") as run:
            assert run.wait(STARTING_S + ENDING_S) == 1, run.terminal
            assert run.left_running() == {}
    return run


@pytest.mark.parametrize(
    "name", [pytest.param("dies in an update", marks=pytest.mark.slow), "answers nothing to a rollout"]
)
def test_an_engine_that_fails(name: str, tiny_models: TinyModels, tmp_path: Path) -> None:
    behaviour, message = ENGINES[name]
    run = run_to_its_error(tmp_path, tiny_models("llama"), behaviour)
    error = the_error(run)
    assert re.match(r"(weight sync to )?" + message, error, re.DOTALL), error
    assert "Traceback" not in error, error
    assert "Traceback" in details(error)


def test_an_engine_that_makes_up_its_samples_teaches_nothing(tiny_models: TinyModels, tmp_path: Path) -> None:
    rollout = {"sampling": {"max_new_tokens": 4}, "mismatch": {}}
    run = run_to_its_error(tmp_path, tiny_models("llama"), "ok", rollout=rollout)
    assert re.search(r"step 1: engine and trainer disagree .*sample \d+ \(data row \d+\)", the_error(run)), run.terminal
    assert (tmp_path / "runs/run/metrics.jsonl").read_text() == ""


@pytest.mark.slow
def test_an_engine_that_keeps_an_old_tensor_is_found_in_the_next_step(tiny_models: TinyModels, tmp_path: Path) -> None:
    """The next step detects an engine that keeps an old tensor. The log-prob gap (one of 16 matrices, one update old)
    is small enough for bfloat16's rounding, but far above that of a correct engine."""
    rollout = {"engine": "transformers", "sampling": {"max_new_tokens": 8}}
    config = write_config(tmp_path, tiny_models("qwen3"), rollout=rollout)
    old = "model.layers.1.mlp.gate_proj.weight"
    environment = {"PYTHONPATH": f"{ROOT / 'tests/worlds/faults'}:{ROOT}", "MRL_TEST_OLD": old}
    with Train(tmp_path, config, "run.steps=3", copied=False, **environment) as run:
        assert run.wait(STARTING_S + ENDING_S) == 1, run.terminal
    message = r"step 2: engine and trainer compute in float32, .* by the weights of step 1: (\S+) nats a token"
    found = re.search(message, the_error(run))
    assert found is not None and 1e-3 < float(found[1]) < 0.2, run.terminal
    (row,) = (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()
    assert json.loads(row)["mismatch/mean_abs"] < 1e-5, "the first step, of weights that the engine has"


def test_a_reward_function_that_fails(tiny_models: TinyModels, tmp_path: Path) -> None:
    """A reward function that raises ends the run with its error. (For one that hangs see test_reward_pool.py.)"""
    (tmp_path / "mine.py").write_text(REWARD)
    reward = {"function": f"{tmp_path / 'mine.py'}:reward"}
    run = run_to_its_error(tmp_path, tiny_models("llama"), "ok", reward=reward)
    error = the_error(run)
    assert re.search(r"on sample \d+ .*raised:\n.*ZeroDivision", error, re.DOTALL), error
    assert error.count("Traceback") == 1, error  # the traceback of the user's function


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_killed(rank: int, tiny_models: TinyModels, tmp_path: Path) -> None:
    """A rank is killed while rank 0 waits for the engine and the others wait for rank 0."""
    with fake_engine(tmp_path, "generate_hangs") as url:
        rollout = {"urls": [url], "request_timeout_s": 400.0, "sampling": {"max_new_tokens": 4}}
        config = write_config(tmp_path, tiny_models("llama"), actor=TWO_RANKS, rollout=rollout)
        with Train(tmp_path, config) as run:
            wait_until_it_hangs(run, url)
            os.kill(run.pid_of_rank(rank), signal.SIGKILL)
            assert run.wait(ENDING_S) == 137
            assert run.left_running() == {}
    assert run.terminal.count(f"mrl: error: rank {rank} failed first (killed by SIGKILL") == 1, run.terminal
    assert "Traceback" not in run.terminal


class TestSGLang:
    pytestmark = needs_sglang

    @pytest.mark.slow
    def test_killed_in_a_rollout(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        config = write_config(tmp_path, tiny_models("llama"), actor=TWO_RANKS, rollout=LONG)
        more = ["run.steps=9", "batch.prompts_per_step=24", "rollout.max_restarts=0"]
        with Train(tmp_path, config, *more) as run:
            run.wait_for("step 1/9", STARTING_S)
            server = run.pid_of("sglang.launch_server")
            os.killpg(os.getpgid(server), signal.SIGKILL)
            assert run.wait(ENDING_S) == 1
            assert run.left_running() == {}
        error = the_error(run)
        assert error.startswith("rollout failed: engine died during generation"), error
        assert "SIGKILL" in error and "End of" in error and "Traceback" not in error, error
        assert len(error.splitlines()) < 12, error  # without the server's output at its start

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_ended_with_the_run(self, number: signal.Signals, tiny_models: TinyModels, tmp_path: Path) -> None:
        """A signal ends the run and its engine: Ctrl-C in a rollout, or SIGTERM while the engine starts."""
        config = write_config(tmp_path, tiny_models("llama"), actor=TWO_RANKS, rollout=LONG)
        with Train(tmp_path, config, "run.steps=9", "batch.prompts_per_step=24") as run:
            run.wait_for("step 1/9" if number == signal.SIGINT else "waiting for the engine", STARTING_S)
            run.pid_of("sglang.launch_server")
            run.signal(number)
            assert run.wait(ENDING_S) == 128 + number
            assert run.left_running() == {}
        assert run.terminal.count(f"mrl: stopped by {number.name}; all ranks have ended") == 1
        assert "Traceback" not in run.terminal and "error" not in run.terminal.lower(), run.terminal

    def test_ended_with_a_killed_rank(self, tiny_models: TinyModels, tmp_path: Path) -> None:
        """The engine ends with rank 0, which is killed and so cannot close the engine that it started."""
        config = write_config(tmp_path, tiny_models("llama"), actor=TWO_RANKS)
        with Train(tmp_path, config) as run:
            run.wait_for("waiting for the engine", STARTING_S)
            above = [process.cmdline() for process in psutil.Process(run.pid_of("sglang.launch_server")).parents()]
            assert any("tests.helpers.engine_fork_servers" in line for line in above), "the engine is no copy"
            os.kill(run.pid_of_rank(0), signal.SIGKILL)
            assert run.wait(ENDING_S) == 137
            assert run.left_running() == {}
