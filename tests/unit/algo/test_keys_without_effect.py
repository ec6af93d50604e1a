"""Keys that the configuration refuses for want of an effect have none in the functions that they are for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrl.algo import Sequences, advantages, policy_loss
from mrl.options.estimators import ESTIMATORS, EstimatorOptions
from mrl.options.losses import POLICY_LOSSES

LENS = (3, 5, 2, 4)
GROUP = torch.tensor([0, 0, 1, 1])
MASK = torch.arange(max(LENS))[None] < torch.tensor(LENS)[:, None]


def gradient(loss: str, **options: float) -> Tensor:
    """The gradient of a policy loss at ratio 1, as in the only update of a step."""
    generator = torch.Generator().manual_seed(1)
    log_probs = (-torch.rand(sum(LENS), generator=generator)).requires_grad_()
    advantage = torch.randn(sum(LENS), generator=generator)
    value, _ = policy_loss.compute(
        loss,
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        advantages=advantage,
        weights=torch.full_like(advantage, 1 / sum(LENS)),
        sequences=Sequences.of_mask(MASK),
        chosen=torch.zeros_like(advantage, dtype=torch.bool),
        **options,
    )
    [found] = torch.autograd.grad(value, log_probs)
    return found


@pytest.mark.parametrize("loss", [name for name, kind in POLICY_LOSSES.items() if kind.of_ratio])
def test_bounds_of_a_ratio_leave_the_gradient_at_ratio_1(loss: str) -> None:
    usual = gradient(loss)
    assert float(usual.abs().sum()) > 0
    for key in POLICY_LOSSES[loss].of_ratio:
        default = POLICY_LOSSES[loss].model_fields[key].default
        assert torch.equal(gradient(loss, **{key: 0.5 * default if default < 2 else 2 * default}), usual), key


def advantage_of(name: str, scores: Tensor) -> Tensor:
    rewards = torch.zeros(MASK.shape, dtype=torch.float64)
    rewards[torch.arange(len(LENS)), torch.tensor(LENS) - 1] = scores.double()
    greedy = scores[:2].repeat_interleave(2).double()
    found, _ = advantages.compute(name, token_rewards=rewards, response_mask=MASK, group=GROUP, greedy_scores=greedy)
    return found


def options_of(name: str) -> EstimatorOptions:
    return ESTIMATORS[name].model_construct()


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if options_of(name).is_shift_free])
def test_a_mean_of_all_scores_cancels(name: str) -> None:
    scores = torch.tensor([0.0, 1.0, 0.5, -2.0])
    torch.testing.assert_close(advantage_of(name, scores + 3), advantage_of(name, scores))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if options_of(name).is_scale_free])
def test_a_scale_of_all_scores_cancels(name: str) -> None:
    scores = torch.tensor([0.0, 1.0, 0.5, -2.0])
    torch.testing.assert_close(advantage_of(name, 4 * scores), advantage_of(name, scores), rtol=1e-5, atol=1e-5)
