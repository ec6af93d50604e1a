"""Learning rates equal those of transformers after the warm-up, and are never 0 by accident."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from mrl.config.checks.models import check_optimizer
from mrl.config.schema import OptimizerConfig, RLConfig
from mrl.learner.optimizer import LearningRateSchedule

STEPS = 10


def of_transformers(decay: str, warmup: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    make = get_cosine_schedule_with_warmup if decay == "cosine" else get_linear_schedule_with_warmup
    schedule, found = make(optimizer, warmup, STEPS), []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def of_mrl(cfg: OptimizerConfig, updates: int = STEPS, begun: int = 0) -> list[float]:
    """Returns the learning rates of updates begun + 1 to `updates`. begun: number of updates in the checkpoint"""
    groups: Any = SimpleNamespace(param_groups=[{}])
    schedule, found = LearningRateSchedule(cfg, groups), []
    schedule.num_steps = begun
    schedule.step(0)
    for _ in range(begun, updates):
        schedule.step(1)
        found.append(groups.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_after_the_warm_up_updates_have_transformers_rates(decay: str, warmup: int) -> None:
    cfg = OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps": warmup, "decay": decay, "decay_steps": STEPS})
    ours, theirs = of_mrl(cfg), of_transformers(decay, warmup)
    assert ours[warmup:] == pytest.approx(theirs[warmup:]) and ours[-1] > 0
    assert ours[:warmup] == pytest.approx([*theirs[1:warmup], *[1.0] * (warmup > 0)]), "theirs, without the first 0"
    assert of_mrl(cfg, begun=6) == ours[6:], "a run that goes on has the same"
    assert of_mrl(cfg, STEPS + 3)[:STEPS] == ours, "and one that is made longer"


def test_min_lr_is_reached_after_the_decay() -> None:
    cfg = OptimizerConfig(lr=1.0, decay="cosine", decay_steps=4, min_lr=0.5)
    assert of_mrl(cfg, 6) == pytest.approx([1.0, 0.926777, 0.75, 0.573223, 0.5, 0.5], abs=1e-6)
    assert of_mrl(OptimizerConfig(lr=1.0, warmup_steps=2), 4) == [0.5, 1.0, 1.0, 1.0]


def test_a_run_that_goes_on_after_its_decay_has_to_say_with_what() -> None:
    cfg = OptimizerConfig(lr=1.0, decay="linear", decay_steps=5)
    [problem] = check_optimizer("actor.optimizer", cfg, 6)
    assert "5 of 6 updates" in problem.message and problem.keys == (
        "actor.optimizer.decay_steps",
        "actor.optimizer.min_lr",
    )
    said = OptimizerConfig.model_validate({"lr": 1.0, "decay": "linear", "decay_steps": 5, "min_lr": 0.0})
    for good in (said, cfg.model_copy(update={"min_lr": 0.1})):
        assert not [*check_optimizer("actor.optimizer", good, 6)]
    assert not [*check_optimizer("actor.optimizer", cfg, 5)] and not [*check_optimizer("actor.optimizer", cfg, None)]


def test_the_updates_of_each_model_are_counted() -> None:
    cfg = RLConfig.model_validate({
        "trainer": "rl", "run": {"name": "r", "steps": 10}, "model": {"path": "-"}, "data": {"train": "-"},
        "critic": {"warmup_steps": 4}, "algorithm": {"adv_estimator": "gae"}, "reward": {"function": "exact_match"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4, "epochs_per_step": 3},
    })  # fmt: skip
    assert (cfg.min_updates("actor"), cfg.min_updates("critic")) == (36, 60)
