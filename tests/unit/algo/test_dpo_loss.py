"""`dpo_loss` in TRL's form, against the papers' formulas of the losses that it calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from mpmath import mpf

from mrl.algo.preference import PAIR_LOSSES, dpo_loss
from mrl.options.preference import PREFERENCE_LOSSES
from tests.unit.algo.test_algo_preference import PAPERS, Pair, data

OF_MEANS = ("ipo", "sigmoid_norm", "simpo", "orpo", "sft")


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_losses_and_rewards(name: str) -> None:
    policy, reference, tokens = data(1.0)
    if name in OF_MEANS:
        policy, reference = policy / tokens, reference / tokens
    policy.requires_grad_(), reference.requires_grad_()
    losses, *rewards = dpo_loss(*policy, *reference, beta=0.3, loss_type=name)
    given: dict[str, Any] = {} if name == "sft" else {"beta": 0.3}
    options = PREFERENCE_LOSSES[name].filled(given)
    for i in range(tokens.shape[1]):
        sums = [mpf(float(x)) for x in policy.detach()[:, i]]
        pair = Pair(*sums, *reference.detach()[:, i].tolist(), 1, 1, options)
        assert float(losses[i].detach()) == pytest.approx(float(PAPERS[name](pair)), rel=1e-9)
    for got, p, r in zip(rewards, policy.detach(), reference.detach(), strict=True):
        torch.testing.assert_close(got, 0.3 * (p - r))
    losses.mean().backward()
    assert policy.grad is not None and reference.grad is None and not rewards[0].requires_grad


def test_by_hand() -> None:
    policy, reference = torch.tensor([[-1.0], [-3.0]]), torch.tensor([[-2.0], [-2.0]])
    log_sigmoid = torch.nn.functional.logsigmoid
    losses, chosen, rejected = dpo_loss(*policy, *reference, beta=0.5)
    torch.testing.assert_close(losses, -log_sigmoid(torch.tensor([1.0])))
    assert chosen.tolist() == [0.5] and rejected.tolist() == [-0.5]
    smoothed, *_ = dpo_loss(*policy, *reference, beta=0.5, label_smoothing=0.1)
    torch.testing.assert_close(smoothed, losses + 0.1)
    biased = torch.tensor([[-5.0], [-2.0]])
    free, chosen, _ = dpo_loss(*policy, *biased, beta=0.5, reference_free=True)
    torch.testing.assert_close(free, losses)
    assert chosen.tolist() == [2.0]
    assert float(dpo_loss(*policy, *reference, beta=0.5, loss_type="ipo")[0]) == pytest.approx(1.0)


def test_every_pair_loss_is_there_and_mistakes_are_named() -> None:
    policy, reference, _ = data(1.0)
    for name in PAIR_LOSSES.names():
        assert dpo_loss(*policy, *reference, loss_type=name)[0].shape == policy[0].shape
    with pytest.raises(ValueError, match="unknown pair loss 'dpo'"):
        dpo_loss(*policy, *reference, loss_type="dpo")
    with pytest.raises(TypeError, match="unknown option label_smoothing"):
        dpo_loss(*policy, *reference, loss_type="ipo", label_smoothing=0.1)
    with pytest.raises(TypeError, match="no option weight"):
        dpo_loss(*policy, *reference, weight=2.0)
    with pytest.raises(ValueError, match="shapes differ"):
        dpo_loss(policy[0], policy[1, :3], *reference)
    names = ["policy_chosen_logps", "policy_rejected_logps", "reference_chosen_logps", "reference_rejected_logps"]
    parameters = inspect.signature(dpo_loss).parameters
    assert [*parameters][:4] == names and parameters["reference_free"].default is False  # as TRL's
