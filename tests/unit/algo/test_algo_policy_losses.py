"""The other policy losses token by token from their formulas, their gradients, and KL forms with the gradient of k2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from mrl.algo import aggregate, kl, policy_loss, rollout_correction, token_choice
from mrl.algo.advantages import ESTIMATORS
from mrl.config import schema
from mrl.config.sections.policy import Criterion
from mrl.options import estimators
from mrl.options.losses import POLICY_LOSSES


def clipped_ratio(lp: float, old: float) -> float:
    return min(max(math.exp(lp - old), 0.8), 1.28)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def sapo(lp: float, old: float, adv: float) -> float:
    tau = 0.7 if adv > 0 else 1.3
    return -adv * sigmoid(tau * (math.exp(lp - old) - 1)) * 4 / tau


TOKEN: dict[str, tuple[dict[str, float], Callable[[float, float, float], float]]] = {
    "gpg": ({}, lambda lp, old, adv: -adv * lp),
    "cispo": (
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
        lambda lp, old, adv: -clipped_ratio(lp, old) * adv * lp,
    ),
    "sapo": ({"tau_pos": 0.7, "tau_neg": 1.3}, sapo),
    "dro": ({"dro_beta": 0.4}, lambda lp, old, adv: -(adv * lp - 0.2 * (lp - old) ** 2)),
}


def inputs(spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    old, adv, step = (torch.randn(4, 11, generator=gen, dtype=torch.float64) for _ in range(3))
    adv[0] = 0
    return old + spread * step, old, adv, torch.rand(4, 11, generator=gen, dtype=torch.float64)


@pytest.mark.parametrize("name", sorted(TOKEN))
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_value(name: str, spread: float) -> None:
    options, token = TOKEN[name]
    log_probs, old, adv, weights = inputs(spread)
    want = sum(
        float(w) * token(float(lp), float(o), float(a))
        for lp, o, a, w in zip(*(x.flatten() for x in (log_probs, old, adv, weights)), strict=True)
    )
    got, metrics = policy_loss.compute(
        name, log_probs=log_probs, old_log_probs=old, advantages=adv, weights=weights, **options
    )
    assert float(got) == pytest.approx(want, rel=1e-10)
    assert set(metrics) == {"clipfrac", "ppo_kl", "clipfrac_lower", "approxkl", "ratio"}
    assert float(metrics["ppo_kl"]) == pytest.approx(float((weights * (old - log_probs)).sum()), rel=1e-9)
    assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("name", ["gpg", "sapo", "dro"])
def test_gradient(name: str) -> None:
    log_probs, old, adv, weights = inputs(0.3)

    def loss(x: Tensor) -> Tensor:
        return policy_loss.compute(
            name, log_probs=x, old_log_probs=old, advantages=adv, weights=weights, **TOKEN[name][0]
        )[0]

    assert torch.autograd.gradcheck(loss, log_probs.requires_grad_())


def test_a_clipped_token_of_cispo_keeps_its_gradient() -> None:
    log_probs = torch.tensor([5.0, -5.0, 0.0], requires_grad=True)
    loss, metrics = policy_loss.compute(
        "cispo",
        log_probs=log_probs,
        old_log_probs=torch.zeros(3),
        advantages=torch.tensor([1.0, 2.0, 3.0]),
        weights=torch.ones(3),
        clip_ratio_low=0.2,
    )
    loss.backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor([-1.2, -1.6, -3.0]))
    assert float(metrics["clipfrac"]) == 2


@pytest.mark.parametrize("name", sorted(TOKEN))
def test_at_ratio_1_the_gradient_is_the_policy_gradient(name: str) -> None:
    log_probs, _, adv, weights = inputs(1.0)
    log_probs.requires_grad_()
    loss, _ = policy_loss.compute(
        name, log_probs=log_probs, old_log_probs=log_probs, advantages=adv, weights=weights, **TOKEN[name][0]
    )
    (grad,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(grad, -weights * adv)


@pytest.mark.parametrize(("name", "option"), [("sapo", "tau_neg"), ("dro", "dro_beta")])
def test_options_out_of_range_are_refused(name: str, option: str) -> None:
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=f"{option}.* must be > 0"):
        policy_loss.compute(name, log_probs=x, old_log_probs=x, advantages=x, weights=x, **{option: 0.0})


@pytest.mark.parametrize("name", ["k1", "k3", "abs"])
def test_plus_has_the_value_of_its_estimator_and_the_gradient_of_k2(name: str) -> None:
    log_probs, ref, _, _ = inputs(0.5)
    log_probs.requires_grad_()
    plus = kl.penalty(f"{name}+", log_probs, ref)
    torch.testing.assert_close(plus, kl.penalty(name, log_probs, ref))
    (grad,) = torch.autograd.grad(plus.sum(), log_probs)
    torch.testing.assert_close(grad, (log_probs - ref).detach())


def test_the_sum_and_the_normed_sum() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    loss = torch.arange(12, dtype=torch.float64).view(3, 4)
    inside = 0 + 1 + 4 + 5 + 6
    assert float(aggregate.agg_loss("token-sum", loss, mask)) == inside
    assert float(aggregate.agg_loss("seq-mean-token-sum-norm", loss, mask)) == pytest.approx(inside / 2 / 4)
    assert float(aggregate.agg_loss("seq-mean-token-sum-norm", loss, mask, 10.0)) == pytest.approx(inside / 2 / 10)


def choices(section: type[schema.Section], key: str) -> set[str]:
    annotation = section.model_fields[key].annotation
    nested = [get_args(part) or (part,) for part in get_args(annotation)]
    return {name for part in nested for name in part if isinstance(name, str)}


def test_every_name_can_be_configured_and_no_other() -> None:
    found = choices(schema.AlgorithmConfig, "adv_estimator")
    assert found == {*ESTIMATORS.names(), "function"} == set(estimators.ESTIMATORS)
    losses = choices(schema.PolicyLossConfig, "loss_mode")
    assert losses == {*policy_loss.LOSSES.names(), "function"} == set(POLICY_LOSSES)
    assert {name for name, loss in POLICY_LOSSES.items() if loss.chooses_tokens} == set(token_choice.CHOICES.names())
    assert choices(schema.RolloutCorrectionConfig, "rollout_is") == set(rollout_correction.LEVELS)
    assert set(get_args(Criterion)) == set(rollout_correction.CRITERIA)
    assert choices(schema.PolicyLossConfig, "loss_agg_mode") == set(aggregate.MODES.names())
    for name in choices(schema.KLConfig, "penalty"):
        kl.penalty(name, torch.zeros(1), torch.zeros(1))
