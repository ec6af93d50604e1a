"""Asynchronous training: the weight versions of samples, and resuming after a kill."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.inference.engine import Engine
from tests.conftest import TinyModels
from tests.helpers.runs import difference, results, samples, train, train_and_kill
from tests.helpers.train_tools import Train, given, write_config

pytestmark = pytest.mark.long

RUN_S = 300.0
ONE_STEP: dict[str, Any] = {
    "actor": {"parallel": {"tensor": 2}, "optimizer": {"lr": 5e-4}},
    "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4},
    "algorithm": {
        "adv_estimator": "grpo",
        "rollout_correction": {"rollout_is": "token"},
        "use_score_scaling": True,
        "kl": {"use_in_reward": True, "controller": "adaptive", "coef": 0.05, "target": 0.5, "horizon_samples": 50},
    },
    "validation": {"every_steps": 2, "prompts": 4},
    "checkpoint": {"every_steps": 2, "weights_every_steps": 1, "export_hf": False},
}


class Runs:
    """An undisturbed run with real SGLang. `kill` makes a second run, which is killed after step 3 and resumed.
    Responses are generated one step ahead, in segments of 4 tokens. One token of seven ends a response."""

    def __init__(self, folder: Path, model: Path, engine: Engine) -> None:
        sampling = {"max_new_tokens": 16, "stop_token_ids": list(range(3, 320, 7))}
        behind = {"max_staleness": 1, "interrupt": "at_step_end", "segment_tokens": 4, "oversample": 2.0}
        rollout = {**behind, "sampling": sampling, **given(engine, folder)}
        data = {"validation": str(folder / "validation.jsonl")}
        self.folder, self.model = folder, model
        self.config = write_config(folder, model, data=data, rollout=rollout, **ONE_STEP)
        self.whole, self.killed = (folder / "runs" / name for name in ("whole", "killed"))
        train(folder, self.config, "run.name=whole", "run.steps=4")

    def kill(self) -> int:
        """Kills and resumes a second run. Returns the last step before the kill."""
        train_and_kill(self.folder, self.killed, self.config, "run.name=killed", "run.steps=50")
        steps = max(results(self.killed))
        train(self.folder, self.config, "run.name=killed", "run.steps=4")
        return steps


@pytest.fixture(scope="module")
def runs(tiny_models: TinyModels, sglang_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("overlap"), tiny_models("llama"), sglang_engine)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_samples_it_had_drawn_ahead(runs: Runs) -> None:
    assert runs.kill() >= 3, "nothing had to be made again"
    assert results(runs.killed) == results(runs.whole)
    assert samples(runs.killed) == samples(runs.whole)
    assert set(difference(runs.whole, runs.killed).values()) == {0.0}


def test_every_token_has_the_log_prob_that_the_weights_give_it_which_are_named(runs: Runs) -> None:
    kept = torch.load(runs.whole / "checkpoints/step_2/kept.pt", weights_only=True)
    [step] = kept["sampled_steps"]
    found = [sample["arrays"] for group in step["groups"] for sample in group["samples"]]
    born = torch.cat([arrays["versions"] for arrays in found])
    assert step["step"] == 2 and born.unique().tolist() == [0, 1], "no response has gone on over a change of weights"
    assert sum(part["finish"] == "" for group in kept["segments"] for part in group["parts"]), "nothing is in flight"
    gaps = {version: gap(runs, found, version) for version in (0, 1)}
    assert float(gaps[0][born == 0].max()) < 1e-4 < float(gaps[1][born == 0].max())
    assert float(gaps[1][born == 1].max()) < 1e-4 < float(gaps[0][born == 1].max())


def gap(runs: Runs, samples: list[dict[str, torch.Tensor]], version: int) -> torch.Tensor:
    """Returns the log-prob differences, [R], between the engine and transformers with these weights."""
    path = runs.whole / f"hf_step_{version}" if version else runs.model
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for sample in samples:
        ids = torch.cat([sample["prompt"], sample["response_ids"]]).long()
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        own = log_probs.gather(1, ids[1:, None]).flatten()[len(sample["prompt"]) - 1 :]
        found.append((own - sample["log_probs"]).abs())
    return torch.cat(found)


def test_ages_are_told_and_a_validation_is_of_the_weights_of_its_step(runs: Runs) -> None:
    rows = results(runs.whole)
    assert [rows[step]["staleness/max"] > 0 for step in range(1, 5)] == [False, True, True, True]
    assert rows[1]["mismatch/age_0"] < 1e-4 < min(rows[step]["mismatch/age_1"] for step in (2, 3, 4))
    assert {row["weight_version"] for row in samples(runs.whole)["validation_step_2.jsonl"]} == {"2"}


@pytest.mark.slow
def test_an_engine_that_dies_in_the_middle_gets_the_next_weights(tiny_models: TinyModels, tmp_path: Path) -> None:
    rollout = {"max_staleness": 1, "engine": "transformers", "sampling": {"max_new_tokens": 16}}
    algorithm = {"rollout_correction": {"rollout_is": "token"}}
    config = write_config(tmp_path, tiny_models("llama"), rollout=rollout, algorithm=algorithm, run={"steps": 16})
    with Train(tmp_path, config) as run:
        run.wait_for("step 2/16", RUN_S)
        os.kill(run.pid_of("transformers_engine"), signal.SIGKILL)
        assert run.wait(RUN_S) == 0, run.terminal[-6000:]
        assert run.left_running() == {}
    assert "starting it again (restart 1 of 3" in run.terminal
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert all(row["staleness/max"] <= 1 for row in rows)


# ---- the thread
