"""Several LoRA adapters of one base in one run: each equals the result of a run with it alone."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.cli import main
from mrl.config.loader import load
from mrl.config.schema import RLConfig
from mrl.inference.engine import Engine
from mrl.inference.launch import started_with
from mrl.inference.start import start_engine
from mrl.weights.disk.adapter_files import WEIGHTS
from mrl.weights.disk.model_files import GENERATION
from tests.conftest import TinyModels
from tests.helpers.runs import results, samples, train
from tests.helpers.train_tools import Train, given, write_config

pytestmark = [
    pytest.mark.long,
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang"),
]
UPPER = """
def upper_case(prompt, response, row):
    return sum(c.isupper() for c in response) / 16
"""
LORA: dict[str, Any] = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "o_proj"]}
SHARED: dict[str, Any] = {
    "actor": {"parallel": {"tensor": 2}, "optimizer": {"lr": 3e-2}, "lora": LORA},
    "sync": {"lora": "adapter", "verify": "checksum"},
    "checkpoint": {"every_steps": 1, "export_hf": True},
}
STEPS = 3


def second(folder: Path) -> dict[str, Any]:
    """Returns the second adapter's own sections: data, reward, algorithm, optimizer, rank and lengths."""
    (folder / "upper.py").write_text(UPPER)
    rows = (json.dumps({"prompt": f"Name {n}:", "answer": "x"}) for n in range(12))
    (folder / "names.jsonl").write_text("\n".join(rows) + "\n")
    return {
        "data": {"train": str(folder / "names.jsonl"), "max_prompt_tokens": 24},
        "batch": {"prompts_per_step": 3, "samples_per_prompt": 4},
        "reward": {"function": f"{folder / 'upper.py'}:upper_case"},
        "algorithm": {"adv_estimator": "rloo", "kl": {"use_in_loss": True, "coef": 0.01}},
        "optimizer": {"lr": 1e-2},
        "lora": LORA | {"rank": 2, "targets": ["q_proj", "down_proj"]},
        "sampling": {"max_new_tokens": 10, "stop_token_ids": [9]},
    }


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def config(folder: Path, tiny_models: TinyModels) -> Path:
    adapters = {"lower": {}, "upper": second(folder)}
    return write_config(folder, tiny_models("qwen2", tied=True), **SHARED, adapters=adapters)


@pytest.fixture(scope="module")
def engine(folder: Path, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cfg = load(config)
    assert isinstance(cfg, RLConfig)
    with start_engine(started_with(cfg), cfg.model.path, "float32", tmp_path_factory.mktemp("logs")) as made:
        made.wait_ready()
        yield made


@pytest.fixture(scope="module")
def run_dir(folder: Path, config: Path, engine: Engine) -> Path:
    """Trains both adapters for two steps and resumes the run; returns its directory."""
    told = [f"rollout.{key}={value}" for key, value in given(engine, folder).items()]
    for steps in (2, STEPS):
        train(folder, config, *told, "run.name=both", f"run.steps={steps}")
    return folder / "runs/both"


def alone(folder: Path, engine: Engine, model: Path, name: str) -> Path:
    """Trains this adapter alone and returns the run's directory."""
    sections: dict[str, Any] = second(folder) if name == "upper" else {}
    own = {key: value for key, value in sections.items() if key not in ("optimizer", "lora", "sampling")}
    actor = SHARED["actor"] | {key: sections[key] for key in ("optimizer", "lora") if key in sections}
    rollout = given(engine, folder) | {"sampling": sections.get("sampling", {"max_new_tokens": 16})}
    place = folder / name
    place.mkdir()
    shutil.copyfile(folder / "upper.py", place / "upper.py")
    shared = SHARED | {"actor": actor, "rollout": rollout, "run": {"name": "alone", "steps": STEPS}}
    train(place, write_config(place, model, **shared | own))
    return place / "runs/alone"


@pytest.mark.parametrize("name", ["lower", "upper"])
def test_each_adapter_becomes_to_the_bit_what_a_run_of_it_alone_makes(
    folder: Path, run_dir: Path, engine: Engine, tiny_models: TinyModels, name: str
) -> None:
    other, own = alone(folder, engine, tiny_models("qwen2", tied=True), name), run_dir / "adapters" / name
    weights = load_file(own / "adapter" / WEIGHTS)
    wanted = load_file(other / "adapter" / WEIGHTS)
    assert weights.keys() == wanted.keys() and all(torch.equal(weights[key], wanted[key]) for key in wanted)
    assert max(float(tensor.abs().max()) for key, tensor in weights.items() if "lora_B" in key) > 1e-3
    assert samples(own) == samples(other)
    files = [each / "adapter" / GENERATION for each in (own, other)]  # with end tokens that the base does not have
    ends = [json.loads(file.read_text())["eos_token_id"] for file in files if file.is_file()]
    assert [9 in each for each in ends] == [True, True] * (name == "upper") and len({*map(tuple, ends)}) < 2
    rows, alone_rows = results(run_dir), results(other)
    for step in range(1, STEPS + 1):
        mine = {key.removeprefix(f"{name}/"): value for key, value in rows[step].items() if key.startswith(f"{name}/")}
        assert mine.keys() >= {"reward/mean", "actor/loss", "actor/grad_norm", "mismatch/max_abs"}
        assert mine == {key: alone_rows[step][key] for key in mine}


def test_an_export_describes_its_own_adapter(run_dir: Path) -> None:
    cards = {name: (run_dir / f"adapters/{name}/adapter/README.md").read_text() for name in ("lower", "upper")}
    rewards = {name: f"{results(run_dir)[STEPS][f'{name}/reward/mean']:.4g}" for name in cards}
    assert "names.jsonl" in cards["upper"] and "train.jsonl" not in cards["upper"]
    assert "train.jsonl" in cards["lower"] and "names.jsonl" not in cards["lower"]
    for name, card in cards.items():
        assert f"both ({name})" in card and rewards[name] in card


def test_an_adapter_of_a_checkpoint_is_converted_by_its_name(run_dir: Path, tmp_path: Path) -> None:
    step = str(run_dir / f"checkpoints/step_{STEPS}")
    convert = ["convert", "megatron-to-hf", step, str(tmp_path / "upper"), "--adapter", "--model"]
    assert main([*convert, "adapters/upper"]) == 0
    assert (tmp_path / "upper" / WEIGHTS).read_bytes() == (run_dir / "adapters/upper/adapter" / WEIGHTS).read_bytes()
    assert "names.jsonl" in (tmp_path / "upper/README.md").read_text()
    ends = [
        json.loads((each / GENERATION).read_text()) for each in (tmp_path / "upper", run_dir / "adapters/upper/adapter")
    ]
    assert ends[0] == ends[1] and 9 in ends[0]["eos_token_id"]


def test_samples_are_of_the_adapter_that_is_trained(run_dir: Path) -> None:
    rows = results(run_dir)
    assert max(row[f"{name}/mismatch/max_abs"] for row in rows.values() for name in ("lower", "upper")) < 1e-4
    assert rows[STEPS]["upper/kl/ref"] > 1e-3, "the adapter does nothing: what was compared is the model without it"
    assert len((run_dir / "engines.jsonl").read_text().splitlines()) == STEPS, "the engines' loads, of all adapters"
    assert rows[STEPS]["reward/mean"] == sum(rows[STEPS][f"{name}/reward/mean"] for name in ("lower", "upper")) / 2


@pytest.mark.slow
def test_a_run_whose_engine_dies_gives_all_adapters_to_the_next_one(folder: Path, config: Path, run_dir: Path) -> None:
    """After its own engine is killed in the second step, the run gives all adapters to the restarted engine."""
    with Train(folder, config, "run.name=killed", f"run.steps={STEPS}", "rollout.max_restarts=2") as run:
        run.wait_for("step 1/3", 240)
        os.kill(run.pid_of("sglang::scheduler"), signal.SIGKILL)
        assert run.wait(240) == 0, run.terminal[-6000:]
    rows, wanted = results(folder / "runs/killed"), results(run_dir)
    assert sum(row["rollout/engine_restarts"] for row in rows.values()) >= 1
    for name in ("lower", "upper"):
        assert rows[STEPS][f"{name}/actor/grad_norm"] == wanted[STEPS][f"{name}/actor/grad_norm"]
