"""Engines that give their memory up while the models compute: the same run to the bit, also if one dies over it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.observe import read_metrics
from tests.conftest import TinyModels
from tests.train_tools import Train, write_config

RUN_S = 300.0
PPO: dict[str, Any] = {
    "run": {"steps": 3, "nproc": 2, "timeout_s": 120.0},
    "actor": {"parallel": {"tensor": 2}, "optimizer": {"lr": 1e-2}},
    "critic": {"parallel": {"tensor": 2}, "optimizer": {"lr": 1e-2}, "warmup_steps": 2},
    "algorithm": {"adv_estimator": "gae", "kl": {"use_in_reward": True, "coef": 0.05}},
    "rollout": {"engine": "transformers", "sampling": {"max_new_tokens": 16}, "max_restarts": 2},
    "validation": {"every_steps": 2, "prompts": 4},
    "ema": {"decay": 0.5, "in_validation": True},
    "checkpoint": {"every_steps": 2, "export_hf": True},
}
ALL = {
    "actor": PPO["actor"] | {"offload": "all"},
    "critic": PPO["critic"] | {"offload": "all"},
    "ref": {"offload": "all"},
    "rollout": PPO["rollout"] | {"release": "all"},
}


def start(folder: Path, model: Path, **sections: Any) -> Train:
    folder.mkdir()
    data = {"data": {"validation": str(folder / "validation.jsonl")}}
    return Train(folder, write_config(folder, model, **PPO | data | sections))


def engine(run: Train) -> int:
    return run.pid_of("transformers_engine")


def left(folder: Path) -> dict[str, Any]:
    """What a run leaves: samples and metrics, weights apart."""
    files = sorted((folder / "runs/run/rollouts").glob("*.jsonl"))
    speed = ("time/", "perf/", "memory/", "unix_time", "rollout/engine_restarts")
    rows = [{k: v for k, v in row.items() if not k.startswith(speed)} for row in read_metrics(folder / "runs/run")]
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
    """Critic warm-up, a step that trains both, validations of the actor and of its average; nothing is given up."""
    folder = tmp_path_factory.mktemp("release") / "none"
    with start(folder, tiny_models("llama")) as run:
        assert run.wait(RUN_S) == 0, run.terminal
    return folder


def test_a_run_that_gives_everything_up_and_whose_engine_dies_over_it_is_the_same_to_the_bit(
    undisturbed: Path, tiny_models: TinyModels, tmp_path: Path
) -> None:
    folder = tmp_path / "all"
    with start(folder, tiny_models("llama"), **ALL) as run:
        wait_for_file(run, folder / "runs/run/rollouts/step_1.jsonl")
        os.kill(engine(run), signal.SIGKILL)
        assert run.wait(RUN_S) == 0, run.terminal
        assert run.left_running() == {}
    assert run.terminal.count("starting it again") == 1 and "Traceback" not in run.terminal
    ours, theirs = left(folder), left(undisturbed)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name] == theirs[name], name
    for name in ("hf", "hf_ema"):
        mine, wanted = weights(folder, name), weights(undisturbed, name)
        assert mine.keys() == wanted.keys() and mine and all(torch.equal(mine[key], wanted[key]) for key in mine)
    rows = read_metrics(folder / "runs/run")
    assert all(row["memory/offloaded_gib"] > 0 and "time/sync" in row for row in rows[1:])
    assert json.loads(ours["step_1.jsonl"][0])["weight_version"] == "0", "warm-up: the same weights, the same name"
