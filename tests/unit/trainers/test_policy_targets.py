"""Weights of the terms of the actor's loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrl import platform

platform.install()

from mrl.config.schema import RLConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.learner import losses  # noqa: E402
from mrl.trainers.rl.experience import Passes, make_experience  # noqa: E402
from mrl.trainers.rl.policy_update import policy_targets  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402

LENGTHS = torch.tensor([3, 1, 4, 2])


def config(**algorithm: Any) -> RLConfig:
    return RLConfig.model_validate({
        "trainer": "rl", "run": {"name": "r"}, "model": {"path": "-"}, "data": {"train": "-"},
        "reward": {"function": "exact_match"}, "batch": {"prompts_per_step": 2, "samples_per_prompt": 2},
        "algorithm": {"adv_estimator": "grpo"} | algorithm,
    })  # fmt: skip


@pytest.mark.parametrize("rollout_is", ["token", None])
@pytest.mark.parametrize("number", [0, 1])
def test_the_corrected_kl_is_that_of_samples_of_the_policy_that_generated_them(
    rollout_is: str | None, number: int
) -> None:
    """With importance weights the old policy, to which the loss has its ratio, is another one."""
    stream = torch.Generator().manual_seed(1)
    drawn_by, old, new, reference = (-torch.rand(int(LENGTHS.sum()), generator=stream) for _ in range(4))
    new = old.clone() if number == 0 else new
    correction = {"rollout_is": rollout_is, "rollout_is_threshold": "inf"} if rollout_is else {}
    kl = {"use_in_loss": True, "coef": 0.5, "penalty": "k3", "bias_correction": True}
    cfg = config(kl=kl, rollout_correction=correction)
    rollout = Rollout(
        step=0,
        tokens=torch.arange(int(LENGTHS.sum()) + 4),
        seq_lens=LENGTHS + 1,
        prompt_lens=torch.ones(4, dtype=torch.int64),
        group=torch.tensor([0, 0, 1, 1]),
        scores=torch.zeros(4),  # no advantages, so the loss is the KL term
        rollout_log_probs=drawn_by,
    )
    exp = make_experience(cfg.algorithm, rollout, Passes(log_probs=old, ref_log_probs=reference), 0.0)
    actor: Any = SimpleNamespace(total_over_context=lambda partial: partial)
    targets = policy_targets(bare_run(cfg, actor, None), exp, number)
    loss = losses.policy(cfg.algorithm.policy_loss, cfg.algorithm.kl, cfg.algorithm.kl.coef, targets)

    def value_and_gradient(of: Any) -> tuple[float, torch.Tensor]:
        log_probs = new.clone().requires_grad_()
        value = of(log_probs)
        value.backward()
        assert log_probs.grad is not None
        return float(value.detach()), log_probs.grad

    def by_hand(log_probs: torch.Tensor) -> torch.Tensor:
        lead = reference - log_probs
        ratio = (log_probs - (drawn_by if rollout_is else old)).exp()
        return 0.5 * (ratio * (lead.exp() - lead - 1)).mean()

    places = torch.arange(new.numel())
    made = value_and_gradient(lambda x: loss.compute(torch.stack([x, torch.zeros_like(x)]), places).loss)
    expected = value_and_gradient(by_hand)
    assert made[0] == pytest.approx(expected[0], rel=1e-5)
    assert torch.allclose(made[1], expected[1], atol=1e-6)
