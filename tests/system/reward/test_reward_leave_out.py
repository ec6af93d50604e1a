"""`reward.on_error: leave_out`: a sample whose score fails never counts as a wrong one."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrl.config.schema import RLConfig
from mrl.core import Prompt, Request, Sample
from mrl.evaluation.answers import summary
from mrl.observe.files import read_jsonl
from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager
from mrl.sampling.dynamic_sampling import SamplingError
from mrl.trainers.rl.experience import Passes, make_experience
from mrl.trainers.rl.generate import Generator
from tests.helpers.simulated import SimulatedEngine
from tests.system.agents.test_agent_endpoint import Model

FUNCTION = """
def score(prompt, response, row):
    if row["index"] in row["failing"]:
        raise ConnectionError("the judge is gone")
    return {"score": row["scores"][row["index"]], "part": 1}
"""


class Parts(SimulatedEngine):
    """Data, engine and tokenizer of a generator in one object. Each sample has its own row."""

    def __init__(self, scores: list[float], failing: tuple[int, ...]) -> None:
        super().__init__(self.answer)
        self.scores, self.failing = scores, failing

    def prompts_for_step(self, step: int, n: int, seed: int) -> list[Prompt]:
        return [Prompt(step + i, (3, 4), {"prompt": "p"}, "p") for i in range(n)]

    first = lambda self, n: self.prompts_for_step(0, n, 0)  # noqa: E731

    def answer(self, request: Request, params: object) -> Sample:
        row = {"prompt": "p", "index": request.sample_id, "failing": self.failing, "scores": self.scores}
        own = Request(request.sample_id, request.group, Prompt(request.prompt.index, (3, 4), row, "p"), request.seed)
        return Sample(own, np.array([5, 6]), np.array([-1.0, -1.0]), "stop", "0")


def config(folder: Path, on_error: str, **algorithm: Any) -> RLConfig:
    (folder / "mine.py").write_text(FUNCTION)
    (folder / "rollouts").mkdir(exist_ok=True)
    return RLConfig.model_validate(
        {
            **{"trainer": "rl", "run": {"name": "run"}, "model": {"path": "-"}, "data": {"train": "-"}},
            "reward": {"function": f"{folder / 'mine.py'}:score", "on_error": on_error, "workers": 1},
            "batch": {"prompts_per_step": 3, "samples_per_prompt": 2, "samples_per_minibatch": 2},
            "validation": {"prompts": 4},
            "algorithm": {"adv_estimator": "grpo", **algorithm},
        }
    )


def drawn(folder: Path, scores: list[float], failing: tuple[int, ...], on_error: str = "leave_out", **algorithm: Any):
    parts, notes = Parts(scores, failing), list[str]()
    cfg = config(folder, on_error, **algorithm)
    with RewardManager(cfg.reward) as rewards:
        parts_: Any = parts
        made = Generator(cfg, folder, parts_, rewards, notes.append, Model().tokenizer, parts_, parts_)
        made.open_scheduler(SimpleNamespace(most_s=1.0, left_s=lambda since: 1.0))
        rollout, metrics = made.step(0)
    return cfg, rollout, metrics, notes


ESTIMATORS = {  # the samples that remain if samples 1 and 4 of three groups of two fail
    "grpo": [2, 3],
    "rloo": [2, 3],
    "reinforce_plus_plus": [0, 2, 3, 5],
    "gae": [0, 2, 3, 5],
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_is_learnt_is_as_if_the_sample_had_never_been_drawn(tmp_path: Path, estimator: str) -> None:
    """Advantages are as if the failed samples had never been generated: all others have equal scores, so there is
    nothing to learn. `on_error: zero` would discourage the failed ones."""

    def advantages(on_error: str) -> torch.Tensor:
        cfg, rollout, _, _ = drawn(tmp_path, [1.0] * 6, (1, 4), on_error, adv_estimator=estimator)
        values = torch.zeros(rollout.num_response_tokens) if estimator == "gae" else None
        assert rollout.num_samples == (len(ESTIMATORS[estimator]) if on_error == "leave_out" else 6)
        assert on_error == "zero" or rollout.scores.tolist() == [1.0] * rollout.num_samples
        old = torch.full((rollout.num_response_tokens,), -1.0)
        return make_experience(cfg.algorithm, rollout, Passes(log_probs=old, values=values), 0.0).advantages

    assert advantages("leave_out").abs().max() < 1e-6
    assert advantages("zero").abs().max() > 0.1


def test_it_is_counted_and_written_down(tmp_path: Path) -> None:
    _, rollout, metrics, notes = drawn(tmp_path, [1.0, 0.0] * 3, (3,))
    assert rollout.group.tolist() == [0, 0, 1, 1], "one that is left alone compares with nothing"
    assert metrics["reward/left_out"] == 1 and metrics["reward/failed"] == pytest.approx(1 / 6)
    assert metrics["reward/mean"] == 0.5 and metrics["reward/part"] == 1
    rows = read_jsonl(tmp_path / "rollouts/step_1.jsonl")
    [unscored] = [row for row in rows if row["score"] is None]
    assert "the judge is gone" in unscored["reward_error"] and unscored["sample_id"] is None
    [alone] = [row for row in rows if "left_out" in row and row is not unscored]
    assert len(rows) == 6 and (alone["sample_id"], alone["score"]) == (None, 1.0), "no sample is lost"
    assert "the other samples of its group are left out" in alone["left_out"] and "reward_error" not in alone
    assert "1 of 6 samples are left out, the reward failed on them" in notes[-1]
    with pytest.raises(
        SamplingError, match=r"(?s)no group of the step .*\(reward.on_error: leave_out\).*judge is gone"
    ):
        drawn(tmp_path, [1.0] * 6, (0, 3, 4))


def test_dynamic_sampling_and_parts_of_the_score_see_what_is_left(tmp_path: Path) -> None:
    """Dynamic sampling and score parts see only the remaining samples: groups 0 and 1 lose a sample each, so only group
    2 is trained on."""
    filters = {"enable": True, "metric": "score", "max_num_gen_batches": 1, "on_shortage": "fill"}
    _, rollout, metrics, _ = drawn(tmp_path, [1.0, 0.0] * 3, (1, 2), filter_groups=filters)
    assert rollout.rows is not None and rollout.rows.tolist() == [2, 2]
    assert metrics["sampling/dropped_equal"] == 2 and metrics["reward/failed"] == pytest.approx(2 / 6)


def test_validation_has_no_score_of_it(tmp_path: Path) -> None:
    parts: Any = Parts([1.0, 1.0, 1.0, 0.0], (1,))
    cfg = config(tmp_path, "leave_out")
    with RewardManager(cfg.reward) as rewards:
        notes: list[str] = []
        made = Generator(cfg, tmp_path, parts, rewards, notes.append, Model().tokenizer, parts, parts)
        metrics = made.validate(0, lambda sample: None, "validation")
    assert metrics["validation/mean"] == pytest.approx(2 / 3)
    [note] = notes
    assert note.startswith("1 of 4 samples are left out, the reward failed on them"), "told once"
    assert note.endswith("raised: ConnectionError: the judge is gone")


def one(index: int, failing: tuple[int, ...] = ()) -> Sample:
    row = {"prompt": "p", "index": index, "failing": failing, "scores": [1.0] * 9}
    return Sample(Request(index, index // 2, Prompt(index, (1,), row), 0), [5], [-1.0], "stop", "0", "x")


def test_the_sample_says_that_it_has_no_score(tmp_path: Path) -> None:
    samples = [one(0), one(1, (1,)), one(2), one(3)]
    with RewardManager(config(tmp_path, "leave_out").reward) as rewards:
        rewards.collect(samples)
        assert rewards.failures == 1
    assert math.isnan(samples[1].score) and "the judge is gone" in samples[1].left_out and not samples[1].score_parts
    assert [sample.score for sample in samples if not sample.left_out] == [1.0] * 3
    found = summary(samples, 2, 1.0)
    assert found["estimates"]["exact"]["value"] == 1 and found["estimates"]["failed"]["value"] == 0.25
    with pytest.raises(RewardError, match="(?s)no prompt has scores for all .*judge is gone"):
        summary(samples[:2][::-1], 2, 1.0)


def test_samples_are_told_apart_by_themselves(tmp_path: Path) -> None:
    """Samples are identified by the object itself, not by its id: Python reuses ids, and a new sample must not get the
    score of a deleted one."""
    with RewardManager(config(tmp_path, "stop").reward) as rewards:
        for index in range(50):
            rewards.submit(one(index % 9, (index % 9,)))  # dropped at once: nothing collects it
        kept = [one(index) for index in range(9)]
        rewards.collect(kept)
    assert [sample.score for sample in kept] == [1.0] * 9
