"""Resuming after a kill reproduces the uninterrupted run: weights, metrics and samples."""

from __future__ import annotations

import contextlib
import importlib.util
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.inference.engine import Engine
from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.runs import (
    RUN_S,
    Runs,
    assert_the_same,
    difference,
    results,
    samples,
    train,
)
from tests.helpers.train_tools import Train, given, write_config

pytestmark = pytest.mark.longest

PPO: dict[str, Any] = {
    "actor": {
        "parallel": {"tensor": 2},
        "optimizer": {
            **{"lr": 5e-3, "warmup_steps": 4, "weight_decay": 0.1},
            **{"decay": "cosine", "decay_steps": 40, "min_lr": 0.0},
        },
        "max_tokens_per_microbatch": 200,
    },
    "critic": {"parallel": {"pipeline": 2}, "optimizer": {"lr": 5e-3, "warmup_steps": 20}},
    "batch": {
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "samples_per_minibatch": 4,
        "epochs_per_step": 2,
        "shuffle_minibatches": True,
    },  # fmt: skip
    "algorithm": {
        "adv_estimator": "gae",
        "lam": 0.95,
        "use_score_scaling": True,
        "use_score_norm": True,
        "score_clip": 2.0,
        "filter_groups": {"enable": True, "max_num_gen_batches": 2, "on_shortage": "fill"},
        "kl": {"use_in_reward": True, "controller": "adaptive", "coef": 0.05, "target": 0.5, "horizon_samples": 50},
        "policy_loss": {"entropy_coef": 0.3, "entropy_coef_end": 0.0, "entropy_coef_steps": 3},
    },
    "rollout": {"engine": "transformers"},
    "ref": {"policy": "refreshed", "refresh_every_steps": 3, "refresh_share": 0.5},
    "ema": {"decay": 0.9, "in_validation": True},
    "replay": {"buffer_prompts": 6, "prompts_per_step": 2},
    "validation": {"every_steps": 2, "prompts": 4},
    "checkpoint": {"every_steps": 2, "export_hf": True},
}
OTHER_LAYOUT = ("actor.parallel.tensor=1", "actor.parallel.pipeline=2", "critic.parallel.pipeline=1")


@pytest.fixture(scope="module")
def ppo(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """PPO with actor TP2 and critic PP2 on two ranks. A step has four updates (six with replayed samples), each with
    demonstrations too. KL coefficient, reference and weight average change during the run. The run that is killed
    offloads its models and releases the engine's memory."""
    folder = tmp_path_factory.mktemp("resume_ppo")
    data = {"validation": str(folder / "validation.jsonl")}
    demonstrations = {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32}
    ptx = {"data": demonstrations, "coef": 0.1, "samples_per_update": 2}
    config = write_config(folder, tiny_models("qwen2", tied=True), data=data, ptx=ptx, **PPO)
    return Runs(folder, config, before=("actor.offload=all", "critic.offload=optimizer", "rollout.release=all"))


def test_ppo_killed_and_started_again_is_the_same_run(ppo: Runs) -> None:
    rows = results(ppo.whole)
    assert len({row["kl/coef"] for step, row in rows.items() if step}) == 4, "the KL coefficient did not change"
    assert len({row["critic/lr"] for step, row in rows.items() if step}) == 4, "the schedule did not move"
    coefs = [row["actor/entropy_coef"] for step, row in sorted(rows.items()) if step]
    assert coefs == pytest.approx([0.3, 0.2, 0.1, 0.0])
    assert len({row["score/running_std"] for step, row in rows.items() if step}) == 4, "scores were not scaled"
    assert any(row["sampling/dropped_equal"] for step, row in rows.items() if step), "no group was dropped"
    assert_the_same(ppo)


def test_ppo_learns_from_older_samples_and_demonstrations_too(ppo: Runs) -> None:
    rows = results(ppo.whole)
    assert [rows[step]["replay/samples"] for step in range(1, 5)] == [0, 4, 4, 4]
    assert [rows[step]["mismatch/max_abs"] < 1e-4 for step in range(1, 5)] == [True] * 4, "of new samples alone"
    assert all(rows[step]["ptx/loss"] > 0 for step in range(1, 5))
    assert [step for step, row in rows.items() if "validation_ema/mean" in row] == [2, 4]


def test_ppo_the_engine_has_the_average_for_its_validation_alone(ppo: Runs) -> None:
    versions = {
        name: {sample["weight_version"] for sample in found}
        for name, found in samples(ppo.whole).items()
        if name in ("validation_step_2.jsonl", "validation_ema_step_2.jsonl", "step_3.jsonl")
    }
    assert versions == {
        "validation_step_2.jsonl": {"2"},
        "validation_ema_step_2.jsonl": {"2-ema"},
        "step_3.jsonl": {"2"},
    }


def test_ppo_exports_its_average_beside_the_actor(ppo: Runs) -> None:
    models = [AutoModelForCausalLM.from_pretrained(ppo.whole / name).state_dict() for name in ("hf", "hf_ema")]
    assert models[0].keys() == models[1].keys()
    assert not any(torch.equal(a, models[1][name]) for name, a in models[0].items())


def test_the_terminal_says_from_where_and_what_is_dropped(ppo: Runs) -> None:
    path = ppo.killed / "checkpoints/step_2"
    assert f"resuming from {path} (step 2), 2 steps left; dropped what was written after it" in ppo.terminal
    assert "of metrics.jsonl" in ppo.terminal and "of rollouts/" in ppo.terminal
    assert "changed since the checkpoint: run.steps: 50 -> 4" in ppo.terminal


@pytest.mark.slow
def test_ppo_goes_on_under_another_layout_up_to_round_off(ppo: Runs) -> None:
    run = train(ppo.folder, ppo.config, "run.name=moved", "run.steps=4", *OTHER_LAYOUT)
    assert "changed since the checkpoint: actor.parallel.tensor: 2 -> 1" in run.terminal
    moved, whole = results(ppo.moved), results(ppo.whole)
    assert moved.keys() == whole.keys()
    for step, row in whole.items():
        assert moved[step] == pytest.approx(row, rel=1e-4, abs=1e-5), step
    assert max(difference(ppo.whole, ppo.moved).values()) <= 1e-4  # relative; Adam amplifies rounding


def test_a_changed_configuration_is_refused_before_anything_is_loaded(ppo: Runs) -> None:
    before = {file: file.read_bytes() for file in ppo.killed.glob("*") if file.is_file()}
    changes = ("actor.optimizer.lr=1e-3", "batch.epochs_per_step=1")
    with Train(ppo.folder, ppo.config, "run.name=killed", "run.steps=6", *changes) as run:
        assert run.wait(RUN_S) == 1
    error = run.terminal.split("mrl: error: ")[1]
    assert "step_4 was written with another configuration" in error
    assert "  actor.optimizer.lr: 0.005 -> 0.001\n" in error and "  batch.epochs_per_step: 2 -> 1\n" in error
    assert "'checkpoint.accept_changes=[actor.optimizer.lr, batch.epochs_per_step]'" in error
    assert "Traceback" not in error and "waiting for the engine" not in run.terminal
    assert {file: file.read_bytes() for file in ppo.killed.glob("*") if file.is_file()} == before


SFT = """
trainer: sft
run: {{name: run, root: {folder}/runs, steps: 2, trackers: []}}
model: {{path: {model}, dtype: float32}}
actor: {{optimizer: {{lr: 1.0e-3}}}}
data: {{train: {folder}/train.jsonl, max_prompt_tokens: 32}}
batch: {{samples_per_step: 4}}
checkpoint: {{every_steps: 1, keep_last: 1, weights_every_steps: 2}}
"""


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Limits the files of runs that start inside to 100 kB, as a full disk would."""
    limits = resource.prlimit(zygote.pid(), resource.RLIMIT_FSIZE)
    resource.prlimit(zygote.pid(), resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(zygote.pid(), resource.RLIMIT_FSIZE, limits)


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_a_disk_that_gets_full(tiny_models: TinyModels, tmp_path: Path) -> None:
    """On a full disk training continues or stops, as configured. The last good checkpoint stays intact."""
    write_config(tmp_path, tiny_models("llama"))
    config, run_dir = tmp_path / "sft.yaml", tmp_path / "runs/run"
    config.write_text(SFT.format(folder=tmp_path, model=tiny_models("llama")))
    train(tmp_path, config)
    AutoModelForCausalLM.from_pretrained(run_dir / "hf_step_2")
    good = run_dir / "checkpoints/step_2"
    sizes = {file: file.stat().st_size for file in good.rglob("*")}

    with small_files(), Train(tmp_path, config, "run.steps=5", "checkpoint.on_error=warn") as run:
        assert run.wait(RUN_S) == 0, run.terminal
    assert run.terminal.count("not saved, training continues (checkpoint.on_error: warn)") >= 4, run.terminal
    assert "File too large" in run.terminal and "step_5.tmp" in run.terminal
    rows = results(run_dir)
    assert list(rows) == [1, 2, 3, 4, 5] and rows[5]["checkpoint/failed"] >= 1

    with small_files(), Train(tmp_path, config, "run.steps=5") as run:
        assert run.wait(RUN_S) == 1, run.terminal
    assert f"resuming from {good} (step 2)" in run.terminal
    assert "step_3.tmp" in run.terminal.split("mrl: error: ")[1], run.terminal
    assert [path.name for path in good.parent.iterdir()] == ["step_2"]
    assert {file: file.stat().st_size for file in good.rglob("*")} == sizes


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang")
def test_grpo_killed_and_started_again_is_the_same_run(
    tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path
) -> None:
    """GRPO with two data-parallel ranks resumes with a real SGLang server, which stays up and gets the resumed weights.
    The resumed run also offloads between its phases."""
    model, url = tiny_models("llama"), sglang_engine.urls[0]
    config = write_config(
        tmp_path,
        model,
        run={"nproc": 2, "seed": 3},
        batch={"samples_per_minibatch": 4},
        algorithm={"adv_estimator": "grpo", "kl": {"use_in_loss": True, "coef": 0.01}},
        rollout=given(sglang_engine, tmp_path),
        sync={"transport": "http", "verify": "checksum"},
        checkpoint={"every_steps": 2},
    )
    try:
        runs = Runs(tmp_path, config, after=("actor.offload=all", "ref.offload=all"))
    finally:
        sglang_engine.pool.client(url).update_weights_from_disk(str(model), weight_version="default")
    assert_the_same(runs)
