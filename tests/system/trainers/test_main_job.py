"""The main job with its real parts: `mrl train` on Megatron-Core and SGLang, as a user runs it."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.config.checkpoint_size import checkpoint_bytes
from mrl.config.loader import load
from mrl.families import load_arch
from mrl.inference.engine import Engine
from mrl.observe import read_metrics
from mrl.weights.disk.digest import file_digests, weight_files, whole_digest
from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.train_tools import MEASURED, Train, given, write_config
from tools.gpu.trained import rollout_numbers

pytestmark = [
    pytest.mark.longest,
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang"),
]
RUN_S = 400.0
LOG_PROB_TOLERANCE = 1e-4
PPO: dict[str, Any] = {
    "actor": {"parallel": {"tensor": 2, "pipeline": 2}, "optimizer": {"lr": 5e-3}, "max_tokens_per_microbatch": 200},
    "critic": {"parallel": {"context": 2}, "optimizer": {"lr": 5e-3}, "max_tokens_per_microbatch": 300},
    "ref": {"parallel": {"pipeline": 2}},
    "batch": {"prompts_per_step": 8, "samples_per_prompt": 2, "samples_per_minibatch": 8, "epochs_per_step": 2},
    "algorithm": {"adv_estimator": "gae", "lam": 0.95, "kl": {"use_in_reward": True, "penalty": "k3", "coef": 0.05}},
    "sync": {"verify": "checksum", "timeout_s": 60.0},
    "checkpoint": {"every_steps": 2, "export_hf": True},
    "validation": {"every_steps": 2, "prompts": 4},
}
EVERY_STEP = {
    "actor/clipfrac", "actor/entropy", "actor/grad_norm", "actor/loss", "actor/lr", "actor/pg_loss", "actor/ppo_kl",
    "actor/approxkl", "actor/clipfrac_lower", "actor/ratio", "mismatch/ess", "mismatch/k3_kl",
    "actor/skipped", "critic/skipped", "reward/failed", "rollout/engine_restarts",
    "critic/clipfrac", "critic/explained_variance", "critic/grad_norm", "critic/loss", "critic/value_mean",
    "kl/coef", "kl/ref", "mismatch/kl", "mismatch/max_abs", "mismatch/max_sample", "mismatch/mean_abs",
    "perf/tokens_per_s", "perf/tokens_per_s_per_rank", "perf/model_tflop", "perf/tflop_per_s_per_rank",
    "response/mean_tokens", "response/truncated", "reward/length", "reward/mean",
    "engines/running", "engines/tokens_per_s_fastest", "memory/resident_gib/actor_update", "perf/sync_s", "sync/bytes",
    "time/experience", "time/rollout", "time/sync", "time/update",
}  # fmt: skip


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def results(row: dict[str, float]) -> dict[str, float]:
    """Without what says how fast it was, and without the validation that every run ends with."""
    left_out = (*MEASURED, "validation/")
    return {name: value for name, value in row.items() if not name.startswith(left_out)}


def train(folder: Path, *arguments: str | Path) -> Train:
    with Train(folder, *arguments) as run:
        assert run.wait(RUN_S) == 0, run.terminal[-6000:]
        assert run.left_running() == {}
    return run


@pytest.fixture(scope="module")
def ppo(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layouts in one world of four: actor TP2 x PP2, critic CP2 x DP2, reference PP2 x DP2."""
    folder = tmp_path_factory.mktemp("ppo")
    config = write_config(folder, tiny_models("qwen2", tied=True), **PPO)
    text = yaml.safe_load(config.read_text())
    text["data"]["validation"] = str(folder / "validation.jsonl")
    config.write_text(yaml.safe_dump(text))
    train(folder, config, "run.steps=3", "run.profile={steps: [3], ranks: [0, 2]}")
    return folder


@pytest.fixture(scope="module")
def metrics(ppo: Path) -> list[dict[str, float]]:
    return read_metrics(ppo / "runs/run")[:4]


def test_ppo_a_line_of_finite_metrics_a_step(ppo: Path, metrics: list[dict[str, float]]) -> None:
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for row in metrics for value in row.values())
    for row in metrics[1:]:
        assert set(row) >= EVERY_STEP, sorted(EVERY_STEP - set(row))
    assert [row["step"] for row in metrics if "validation/mean" in row] == [0, 2, 3]
    raw = (ppo / "runs/run/metrics.jsonl").read_text()
    assert "null" not in raw
    numbers = rollout_numbers(metrics[1:])  # what the stages of `make test-gpu` read
    assert numbers["steps"] == 3 and numbers["mismatch_max"] < LOG_PROB_TOLERANCE and numbers["sync s"] > 0


def test_ppo_the_export_says_what_it_is(ppo: Path, metrics: list[dict[str, float]]) -> None:
    run_dir = ppo / "runs/run"
    card = ModelCard.load(run_dir / "hf/README.md")
    measured = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert measured["validation/mean"] == metrics[3]["validation/mean"]
    for model in (run_dir / "hf", Path(yaml.safe_load((run_dir / "config.yaml").read_text())["model"]["path"])):
        assert whole_digest(file_digests(weight_files(model))) in card.text
    assert str(ppo) not in card.content


@pytest.mark.slow
def test_ppo_both_models_of_a_checkpoint_are_converted(ppo: Path, tmp_path: Path) -> None:
    step = ppo / "runs/run/checkpoints/step_2"
    for model, name in (("actor", "after 2 steps of PPO"), ("critic", "# run (critic)")):
        done = zygote.run("mrl", "convert", "megatron-to-hf", step, tmp_path / model, "--model", model)
        assert done.returncode == 0, done.stderr
        assert name in (tmp_path / model / "README.md").read_text()


def test_ppo_the_engine_and_the_trainer_agree_after_every_update(metrics: list[dict[str, float]]) -> None:
    assert all(0 < row["mismatch/max_abs"] < LOG_PROB_TOLERANCE for row in metrics[1:])


def test_ppo_updates_clip_and_move_away_from_the_reference(metrics: list[dict[str, float]]) -> None:
    assert max(row["actor/clipfrac"] for row in metrics[1:]) > 0
    assert abs(metrics[1]["kl/ref"]) < 1e-8 < 1e-4 < metrics[2]["kl/ref"] < metrics[3]["kl/ref"]


def test_ppo_the_run_directory(ppo: Path, metrics: list[dict[str, float]]) -> None:
    run_dir = ppo / "runs/run"
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert config["actor"]["parallel"]["tensor"] == 2 and config["batch"]["epochs_per_step"] == 2
    for step in range(3):
        samples = rows_of(run_dir / f"rollouts/step_{step + 1}.jsonl")
        assert [sample["sample_id"] for sample in samples] == list(range(16))
        assert {sample["weight_version"] for sample in samples} == {str(step)}
        mean = sum(sample["score"] for sample in samples) / 16
        assert mean == pytest.approx(metrics[step + 1]["reward/mean"])
    assert {p.name for p in (run_dir / "logs").glob("*.log")} == {
        "engine_0.log",
        *(f"rank_{n}.log" for n in range(4)),
    }
    AutoModelForCausalLM.from_pretrained(run_dir / "hf")


def test_ppo_steps_were_profiled_on_the_ranks_that_were_asked_for(ppo: Path) -> None:
    found = {file.name for file in (ppo / "runs/run/profile").iterdir()}
    assert found == {f"step_3_rank_{rank}.{kind}" for rank in (0, 2) for kind in ("json.gz", "txt")}
    head, *rows = (ppo / "runs/run/profile/step_3_rank_2.txt").read_text().splitlines()
    assert "operation" in head and len(rows) == 10
    with gzip.open(ppo / "runs/run/profile/step_3_rank_0.json.gz") as trace:
        assert any(event.get("name") == "aten::mm" for event in json.load(trace)["traceEvents"])


def test_ppo_checkpoints_are_as_large_as_was_predicted(ppo: Path) -> None:
    cfg = load(ppo / "config.yaml")
    predicted = checkpoint_bytes(cfg, {name: load_arch(cfg.model.path) for name in cfg.models()})
    log = (ppo / "runs/run/logs/rank_0.log").read_text()
    sizes = re.findall(r"step_\d+ is complete: ([\d.]+) MiB", log)
    assert sizes and {float(size) for size in sizes} == {round(predicted / 2**20, 1)}


@pytest.mark.slow
def test_ppo_the_same_command_goes_on(ppo: Path, metrics: list[dict[str, float]]) -> None:
    """From before the last step, which must come out as it did; then further. Also: the report of the whole."""
    run_dir = ppo / "runs/run"
    shutil.rmtree(run_dir / "checkpoints/step_3")
    run = train(ppo, ppo / "config.yaml", "run.steps=4")
    assert f"resuming from {run_dir / 'checkpoints/step_2'} (step 2)" in run.terminal
    rows = read_metrics(run_dir)
    assert rows[:3] == metrics[:3] and [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert results(rows[3]) == pytest.approx(results(metrics[3]), rel=1e-5, abs=1e-7)
    assert rows[4]["mismatch/max_abs"] < LOG_PROB_TOLERANCE
    assert {sample["weight_version"] for sample in rows_of(run_dir / "rollouts/step_4.jsonl")} == {"3"}
    done = zygote.run("mrl", "report", run_dir)
    assert done.returncode == 0, done.stderr
    page = next(run_dir.glob("*.html")).read_text()
    assert "<h3>Reward" in page and "<h3>Value explained variance" in page


@pytest.mark.slow
def test_a_step_samples_the_same_tokens_under_another_layout(
    tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path
) -> None:
    """One process with 16 requests in flight, and CP2 x DP2 with 3, which has the engine give its memory up and wakes
    it at the end (on a CPU SGLang answers, and keeps it); both go to one server, given by its URL, which outlives them:
    nothing else of theirs may, nor keep the weights in shared memory."""
    found, model, url = [], tiny_models("llama"), sglang_engine.urls[0]
    try:
        for context, nproc, requests, release in ((1, 1, 16, "none"), (2, 4, 3, "all")):
            folder = tmp_path / str(nproc)
            folder.mkdir()
            config = write_config(
                folder,
                model,
                run={"seed": 7, "nproc": nproc},
                actor={"parallel": {"context": context}},
                batch={"prompts_per_step": 8},
                rollout={**given(sglang_engine, folder), "concurrent_requests": requests, "release": release},
            )
            train(folder, config)
            rows = rows_of(folder / "runs/run/rollouts/step_1.jsonl")
            found.append([{k: row[k] for k in ("sample_id", "index", "response", "tokens", "score")} for row in rows])
    finally:
        sglang_engine.pool.client(url).update_weights_from_disk(str(model), weight_version="default")
    assert found[0] == found[1]
    assert len({row["response"] for row in found[0]}) > 12


EVEN_ROWS = """
def even(group):
    return group[0]["index"] % 2 == 0
"""


def test_remax_and_a_users_filter(tiny_models: TinyModels, sglang_engine: Engine, tmp_path: Path) -> None:
    """Groups that the filter refuses are replaced. Each prompt that stays has one more response, the greedy one."""
    model, url = tiny_models("llama"), sglang_engine.urls[0]
    (tmp_path / "filters.py").write_text(EVEN_ROWS)
    config = write_config(
        tmp_path,
        model,
        algorithm={"adv_estimator": "remax", "filter_groups": {"function": f"{tmp_path / 'filters.py'}:even"}},
        rollout=given(sglang_engine, tmp_path),
    )
    try:
        train(tmp_path, config)
    finally:
        sglang_engine.pool.client(url).update_weights_from_disk(str(model), weight_version="default")
    rows, metrics = rows_of(tmp_path / "runs/run/rollouts/step_1.jsonl"), read_metrics(tmp_path / "runs/run")[-1]
    drawn, greedy = rows[:8], rows[8:]
    assert [row["index"] % 2 for row in rows] == [0] * 12
    assert [row["index"] for row in greedy] == [row["index"] for row in drawn[::2]]
    assert metrics["sampling/dropped_refused"] > 0
    assert metrics["sampling/greedy_reward_mean"] == pytest.approx(sum(row["score"] for row in greedy) / 4)
    tokenizer, reference = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    for row in greedy:
        ids = torch.tensor([tokenizer(row["prompt"]).input_ids])
        found = reference.generate(ids, do_sample=False, max_new_tokens=16)[0, ids.shape[1] :]
        assert row["response"] == tokenizer.decode(found)
