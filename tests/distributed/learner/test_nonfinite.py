"""A non-finite loss or gradient: the update is skipped on all ranks and logged, and too many of them end the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from mrl.observe import SilentRecorder, read_metrics
from mrl.trainers.shared.updates import NoGradientError, NonFiniteError, Updates, require_gradient
from tests.helpers.nonfinite import LETTER, letter_model, lines, poisoned, sft_config
from tests.helpers.slow import slow_cases
from tests.helpers.tiny import make_tiny
from tests.helpers.train_tools import MADE_UP, Train, write_config
from tests.helpers.world import run_world
from tests.system.launcher.test_trainer_faults import fake_engine, the_error

pytestmark = pytest.mark.long

POISON, BAD_SAMPLE = 77, 5  # as in worlds/nonfinite.py
JOBS: dict[str, dict[str, Any]] = {
    "TP2 x CP2, without sequence parallelism": {"layout": {"tensor": 2, "context": 2, "sequence": False}},
    "PP2 x DP2, bfloat16": {"layout": {"pipeline": 2}, "dtype": "bfloat16"},
    **dict(
        slow_cases(
            ("DP4", {"layout": {}}),
            ("TP2 x PP2", {"layout": {"tensor": 2, "pipeline": 2}}),
            ("EP2 x DP4", {"layout": {"expert": 2}, "model": "moe"}),
            ("critic, TP2 x PP2", {"layout": {"tensor": 2, "pipeline": 2}, "role": "critic"}),
        )
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("nonfinite")
    models = {"dense": make_tiny(root / "dense", "llama"), "moe": make_tiny(root / "moe", "qwen3_moe")}
    for model in models.values():
        poisoned(model, POISON)
    jobs = [
        {"name": name, "layout": job["layout"], "dtype": job.get("dtype", "float32"), "role": job.get("role", "policy"),
         "model": str(models[job.get("model", "dense")])}
        for name, job in JOBS.items()
    ]  # fmt: skip
    (root / "jobs.json").write_text(json.dumps(jobs))
    run_world(4, "nonfinite.py", root / "jobs.json", root / "results.json")
    return json.loads((root / "results.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", JOBS)
def test_the_update_is_skipped_on_every_rank_and_leaves_no_trace(name: str, results: dict[str, Any]) -> None:
    cases = dict(results[name])
    cases.pop("unknown ids")
    assert cases.pop("afterwards") == [True] * 4, "the next good update is that of a learner that met no bad one"
    assert set(cases) == {"output", "target", "gradient"} | ({"copy"} if "without" in name else set())
    for case, found in cases.items():
        assert found["skipped"] == [1.0] * 4, (case, found)
        assert found["unchanged"] == [True] * 4, (case, found)
        assert found["samples"] == ([BAD_SAMPLE] if case == "output" else []), (case, found)
        assert found["finite loss"] == (case in ("gradient", "copy")), (case, found)


def test_a_token_without_an_embedding_is_refused_in_the_same_words_under_every_layout(results: dict[str, Any]) -> None:
    """A token without an embedding gives the same error under every layout. Megatron's embedding returns zeros for it
    if tensor parallelism splits the vocabulary."""
    said = {text for found in results.values() for rank in found["unknown ids"] for text in rank}
    assert said == {
        f"step 1: token 1 of sample 2 is {token}, and the model's vocabulary has the ids 0 to 319"
        for token in (320, -1)
    }


def write_prompts(file: Path, texts: list[str]) -> None:
    rows = ({"prompt": text, "answer": "1"} for text in texts)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_sft_goes_on_past_a_poisoned_row_and_stops_after_three_steps_in_a_row(tmp_path: Path) -> None:
    """SFT skips a poisoned row and stops after three such steps in a row. It reports rows that it left out as too
    long."""
    config = sft_config(tmp_path, letter_model(tmp_path))
    texts = [f"{n} =" for n in range(27)] + ["much too long " * 9]
    for bad in (6, 12, 17, 20, 23):  # in steps 2, 4, 5, 6, 6
        texts[bad] += LETTER
    write_prompts(tmp_path / "train.jsonl", texts)
    with Train(tmp_path, config, "run.steps=9", "data.shuffle=false", "actor.parallel.tensor=2") as run:
        assert run.wait(240) == 1, run.terminal
    run_dir = tmp_path / "runs/run"
    assert "data.train: 1 rows left out: their prompt does not fit into data.max_prompt_tokens=32" in run.terminal
    assert "step 2: 1 of 1 updates skipped because the loss or gradient was not finite; their samples: " in run.terminal
    assert the_error(run).startswith(
        "3 consecutive steps up to step 6 had an update whose loss or gradient was not finite"
    )
    assert f"samples and data rows in {run_dir / 'nonfinite.jsonl'}" in the_error(run)
    told = [(line["step"], line["by"], line["sample_ids"], line["rows"]) for line in lines(run_dir)]
    assert told == [(2, "outputs", [2], [6]), (4, "outputs", [0], [12]), (5, "outputs", [1], [17]),
                    (6, "outputs", [0, 3], [20, 23])]  # fmt: skip
    assert {(line["role"], line["loss"], line["update"]) for line in lines(run_dir)} == {("actor", "nan", 1)}
    rows = read_metrics(run_dir)
    assert [row["actor/skipped"] for row in rows] == [0, 1, 0, 1, 1]
    assert ["actor/loss" in row for row in rows] == [True, False, True, False, False]


REWARD = """
def odd(prompt, response, row):
    if prompt == "3 =":
        raise ValueError("no such number")
    return len(prompt) % 2 + len(response) / 8
"""


def test_ppo_skips_the_mini_batch_with_the_poisoned_sample(tmp_path: Path) -> None:
    """PPO skips the second of two updates of actor and critic, not the first. A failing reward call is counted."""
    prompts = [f"{n} =" for n in range(24)]
    with fake_engine(tmp_path, "ok") as url:
        config = write_config(
            tmp_path,
            letter_model(tmp_path),
            critic={},
            batch={"prompts_per_step": 4, "samples_per_prompt": 1, "samples_per_minibatch": 2},
            rollout={"urls": [url], "sampling": {"max_new_tokens": 4}, "mismatch": MADE_UP},
            algorithm={"adv_estimator": "gae"},
            reward={"function": f"{tmp_path / 'mine.py'}:odd", "on_error": "zero"},
        )
        (tmp_path / "mine.py").write_text(REWARD)
        prompts[6] += LETTER
        write_prompts(tmp_path / "train.jsonl", prompts)
        with Train(tmp_path, config, "run.steps=3", "data.shuffle=false") as run:
            assert run.wait(240) == 0, run.terminal
        handles = httpx.get(f"{url}/calls", trust_env=False).json()["handles"]
    assert {*handles} == {2}, "a push is made for the ranks that the engine says it has"
    found = {(line["step"], line["role"], line["update"]): line for line in lines(tmp_path / "runs/run")}
    assert found[2, "actor", 2]["by"] == found[2, "critic", 2]["by"] == "outputs"
    assert found[2, "actor", 2]["sample_ids"] == found[2, "critic", 2]["sample_ids"] == [2]
    assert found[2, "actor", 2]["rows"] == [6]
    assert all(step == 2 for step, _, _ in found)
    rows = read_metrics(tmp_path / "runs/run")
    assert [row["actor/skipped"] for row in rows] == [0, rows[1]["actor/skipped"], 0] and rows[1]["actor/skipped"] >= 1
    assert torch.isfinite(torch.tensor(rows[2]["actor/grad_norm"]))
    assert [row["reward/failed"] for row in rows] == [0.25, 0, 0]
    samples = (tmp_path / "runs/run/rollouts/step_1.jsonl").read_text().splitlines()
    assert ["no such number" in json.loads(line).get("reward_error", "") for line in samples] == [False] * 3 + [True]
    told = [line for line in run.terminal.splitlines() if "score 0" in line]
    assert len(told) == 1 and told[0].startswith("1 of 4 samples score 0, the reward failed on them ("), run.terminal
    assert "on sample 3 (row 3, prompt '3 =') raised: ValueError: no such number" in told[0]


class Steps:
    """A learner that skips updates as specified."""

    def __init__(self, *skipped: float) -> None:
        self.skipped = list(skipped)
        self.last_outputs = self

    def step(self) -> dict[str, float]:
        return {"skipped": self.skipped.pop(0), "loss": math.nan, "grad_norm": math.nan}

    def nonfinite_samples(self, rollout: Any) -> list[int]:
        return [0]


def make_steps(tmp_path: Path, *steps: list[float], limit: int = 3) -> Updates:
    """Returns the counters after these actor updates by step, 1 for a skipped one. All critic updates are applied."""
    updates = Updates(tmp_path, limit, SilentRecorder(), writes=False)
    for number, skipped in enumerate(steps):
        actor, critic = Steps(*skipped), Steps(0)
        for _ in skipped:
            updates.note("actor", actor, None, range(1), actor.step())  # type: ignore[arg-type]
        updates.note("critic", critic, None, range(1), critic.step())  # type: ignore[arg-type]
        updates.end_of_step(number + 1)
    return updates


def test_adapters_that_nothing_reaches_are_refused() -> None:
    """A loss without a gradient in any adapter is refused. Frozen embeddings with full recomputation cause this."""

    class Cut:
        adapters: object | None = object()

    with pytest.raises(NoGradientError, match="loss 2.5 has a gradient of 0 in all LoRA adapters"):
        require_gradient(Cut(), {"loss": 2.5, "grad_norm": 0.0})  # type: ignore[arg-type]
    require_gradient(Cut(), {"loss": 2.5, "grad_norm": 1e-30})  # type: ignore[arg-type]
    require_gradient(Cut(), {"loss": math.nan, "grad_norm": math.nan})  # type: ignore[arg-type]
    Cut.adapters = None
    require_gradient(Cut(), {"loss": 2.5, "grad_norm": 0.0})  # type: ignore[arg-type]


def test_a_run_whose_last_step_learned_nothing_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="last step applied no update of the actor: .*nonfinite.jsonl"):
        make_steps(tmp_path, [0, 0], [1, 1]).end_of_run()
    make_steps(tmp_path, [0, 0], [1, 1], [0, 1]).end_of_run()  # later steps applied updates
    make_steps(tmp_path, [1], [0]).end_of_run()


def test_a_limit_that_a_resumed_run_is_past_ends_it(tmp_path: Path) -> None:
    before = make_steps(tmp_path, [1], [1], limit=4)
    resumed = Updates(tmp_path, 2, SilentRecorder(), writes=False)
    resumed.load_state_dict(before.state_dict())
    resumed.note_update("actor", Steps(1).step(), 2, [])
    with pytest.raises(NonFiniteError, match="3 consecutive steps up to step 3 had an update whose"):
        resumed.end_of_step(3)
