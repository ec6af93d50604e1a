"""`rollout.early_passes`: log-probs and values of a step's first samples are computed while others are generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.config.loader import ConfigError, load
from mrl.core import Prompt, Request, Rollout, Sample
from mrl.trainers.rl.experience import Passes
from mrl.trainers.rl.passes import StepPasses, ToCompute
from tests.conftest import TinyModels
from tests.helpers.train_tools import write_config

PPO: dict[str, Any] = {
    "algorithm": {"adv_estimator": "gae", "kl": {"use_in_reward": True, "coef": 0.05}},
    "critic": {"optimizer": {"lr": 1e-3}},
    "run": {"steps": 4, "nproc": 2},
    "rollout": {"engine": "transformers", "concurrent_requests": 3},
    "checkpoint": {"every_steps": 2},
}


def drawn(place: int) -> Sample:
    """Returns sample number `place` of a step; all of its tokens are that number."""
    prompt = Prompt(index=place, text="", token_ids=[place] * 2, row={})
    tokens = [place] * (1 + place % 3)
    log_probs = torch.zeros(len(tokens)).numpy()
    return Sample(Request(place, place // 2, prompt, 0), tokens, log_probs, "stop", "4")


def passes(parts: int) -> tuple[StepPasses, list[list[int]]]:
    """Returns the passes of a step of ten samples, and the numbers of the samples that were computed together early."""
    asked: list[list[int]] = []

    def ask(argument: ToCompute) -> None:
        asked.append(argument.part.tokens[argument.part.seq_lens.cumsum(0) - 1].tolist())
        made.add(argument.part)

    def compute(rollout: Rollout) -> Passes:
        values = rollout.tokens[rollout.seq_lens.cumsum(0) - 1].float()
        return Passes(values=values.repeat_interleave(rollout.response_lens))

    made = StepPasses(compute, ask, 10, parts)
    return made, asked


@pytest.mark.parametrize(
    ("order", "early"),
    [
        (range(10), [[0, 1], [2, 3, 4], [5, 6]]),
        ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [[0, 1], [2, 3, 4], [5, 6]]),
        ([0, 1, 5, 6, 7, 8, 9, 2, 3, 12, 11], [[0, 1]]),
    ],
)
def test_a_part_is_computed_by_itself_whenever_it_is_whole(order: list[int], early: list[list[int]]) -> None:
    made, asked = passes(4)
    for _ in range(2):
        made.begin()
        asked.clear()
        see = made.seeing(4, lambda sample: None)
        for place in order:
            see(drawn(place))
        assert asked == early
        samples = [drawn(place) for place in range(10)]
        whole = Rollout.of(4, [s.request.prompt.token_ids for s in samples], [s.response_ids for s in samples])
        values = made.of(whole).values
        assert values is not None and values.tolist() == [token for s in samples for token in s.response_ids]
        seconds = {"rollout": 1.0}
        assert made.early_metrics(seconds) == {"rollout/early_parts": len(early)}
        assert sum(seconds.values()) == pytest.approx(1.0)


def test_parts_of_samples_that_were_left_out_are_not_used() -> None:
    """Sample 2 is as long as sample 5, which would take its place: lengths alone do not show the difference."""
    made, asked = passes(4)
    made.begin()
    see = made.seeing(4, lambda sample: None)
    for place in range(5):
        see(drawn(place))
    assert asked == [[0, 1], [2, 3, 4]]
    samples = [drawn(place) for place in range(10) if place != 2]  # it has no score
    left = Rollout.of(4, [s.request.prompt.token_ids for s in samples], [s.response_ids for s in samples])
    values = made.of(left).values
    assert values is not None and values.tolist() == [token for s in samples for token in s.response_ids]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "algorithm.kl.use_in_reward=false algorithm.kl.coef=0 critic=null algorithm.adv_estimator=grpo",
            "has no effect",
        ),
        ("rollout.early_passes=9", "9 parts exceed the 8 samples of a step"),
        ("rollout.max_staleness=1", "the next samples are generated"),
        ("actor.offload=optimizer", "actor.offload"),
        ("algorithm.filter_groups.enable=true", "only known once all are generated"),
    ],
)
def test_what_cannot_be_computed_early_is_refused(
    override: str, said: str, tiny_models: TinyModels, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_models("llama"), **PPO)
    with pytest.raises(ConfigError) as error:
        load(config, ["rollout.early_passes=4", *override.split()])
    assert said in str(error.value) and "rollout.early_passes" in str(error.value)
