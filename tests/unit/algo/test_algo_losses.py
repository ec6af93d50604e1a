"""Losses, KL and aggregation against references in float64, written from the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mrl.algo import aggregate, kl, policy_loss, value_loss

MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def randn(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=gen, dtype=torch.float64)


def ppo_token(lp: float, old: float, adv: float, low: float, high: float, c: float) -> tuple[float, float, float]:
    """Returns (loss, clipped?, dual-clipped?) of one token."""
    ratio = math.exp(min(max(lp - old, -20.0), 20.0))
    plain, clipped = -adv * ratio, -adv * min(max(ratio, 1 - low), 1 + high)
    loss = max(plain, clipped)
    dual = adv < 0 and loss > -adv * c
    return (-adv * c if dual else loss), float(clipped > plain), float(dual)


@pytest.mark.parametrize("spread", [0.1, 1.0, 30.0])
@pytest.mark.parametrize(("low", "high", "c"), [(0.2, 0.2, 3.0), (0.2, 0.28, 10.0), (0.1, 0.4, 1.2)])
def test_vanilla(spread: float, low: float, high: float, c: float) -> None:
    gen = torch.Generator().manual_seed(5)
    old, adv = randn(gen, 6, 20), randn(gen, 6, 20)
    log_probs = old + spread * randn(gen, 6, 20)
    weights = torch.rand(6, 20, generator=gen, dtype=torch.float64)
    adv[0] = 0
    weights[1] = 0
    want = dict.fromkeys(["loss", "clipfrac", "clipfrac_lower", "ppo_kl", "approxkl", "ratio"], 0.0)
    for lp, o, a, w in zip(log_probs.flatten(), old.flatten(), adv.flatten(), weights.flatten(), strict=True):
        loss, clipped, dual = ppo_token(float(lp), float(o), float(a), low, high, c)
        want["loss"] += float(w) * loss
        want["clipfrac"] += float(w) * clipped
        want["clipfrac_lower"] += float(w) * dual
        gap = min(max(float(o - lp), -20.0), 20.0)
        want["ppo_kl"] += float(w) * gap
        want["approxkl"] += float(w) * gap**2 / 2
        want["ratio"] += float(w) * math.exp(-gap)
    got, metrics = policy_loss.compute(
        "vanilla",
        log_probs=log_probs,
        old_log_probs=old,
        advantages=adv,
        weights=weights,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=c,
    )
    assert float(got) == pytest.approx(want.pop("loss"), rel=1e-10)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(want, rel=1e-10, abs=1e-12)
    if spread > 1:
        assert metrics["clipfrac_lower"] > 0


def test_vanilla_survives_ratios_that_overflow_float32() -> None:
    log_probs = torch.tensor([0.0, -500.0, 0.0, -500.0], requires_grad=True)
    old = torch.tensor([-500.0, 0.0, -500.0, 0.0])
    adv = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, metrics = policy_loss.compute(
        "vanilla", log_probs=log_probs, old_log_probs=old, advantages=adv, weights=torch.ones(4)
    )
    loss.backward()
    # -1.2 (clipped above), 0 (ratio 0), 3 (dual clip), 0.8 (clipped below)
    assert float(loss.detach()) == pytest.approx(-1.2 + 0.0 + 3.0 + 0.8, rel=1e-5)
    assert log_probs.grad is not None and torch.equal(log_probs.grad, torch.zeros(4))
    assert float(metrics["clipfrac_lower"]) == 1 and float(metrics["clipfrac"]) == 2


def test_vanilla_gradient_is_the_policy_gradient_at_ratio_1() -> None:
    log_probs = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    adv, weights = torch.linspace(-1, 1, 9, dtype=torch.float64), torch.linspace(0, 2, 9, dtype=torch.float64)
    loss, metrics = policy_loss.compute(
        "vanilla", log_probs=log_probs, old_log_probs=log_probs.detach(), advantages=adv, weights=weights
    )
    loss.backward()
    torch.testing.assert_close(log_probs.grad, -adv * weights)
    assert float(metrics.pop("ratio")) == pytest.approx(float(weights.sum()))
    assert all(float(value) == 0 for value in metrics.values())


def test_vanilla_gradcheck_inside_and_outside_the_clip() -> None:
    gen = torch.Generator().manual_seed(8)
    old, adv, weights = randn(gen, 40), randn(gen, 40), torch.rand(40, generator=gen, dtype=torch.float64)
    log_probs = (old + 0.7 * randn(gen, 40)).requires_grad_()  # no kink within 1e-6 of these points

    def loss(lp: Tensor) -> Tensor:
        return policy_loss.compute("vanilla", log_probs=lp, old_log_probs=old, advantages=adv, weights=weights)[0]

    assert torch.autograd.gradcheck(loss, (log_probs,))


def test_metric_weights_are_separate_from_loss_weights() -> None:
    old = torch.zeros(4)
    log_probs = torch.tensor([1.0, 1.0, 0.0, 0.0])
    _, metrics = policy_loss.compute(
        "vanilla",
        log_probs=log_probs,
        old_log_probs=old,
        advantages=torch.ones(4),
        weights=torch.full((4,), 5.0),
        metric_weights=torch.full((4,), 0.25),
    )
    assert float(metrics["clipfrac"]) == 0.5 and float(metrics["ppo_kl"]) == -0.5


def test_policy_loss_refuses_what_does_not_fit() -> None:
    four = dict.fromkeys(["log_probs", "old_log_probs", "advantages", "weights"], torch.zeros(4))
    with pytest.raises(ValueError, match="unknown policy loss 'vanila'; did you mean 'vanilla'"):
        policy_loss.compute("vanila", **four)
    with pytest.raises(ValueError, match="clip_ratio_c must be > 1.*got 1.0"):
        policy_loss.compute("vanilla", **four, clip_ratio_c=1.0)
    with pytest.raises(ValueError, match=r"advantages \[1\]"):
        policy_loss.compute("vanilla", **(four | {"advantages": torch.zeros(1)}))
    with pytest.raises(TypeError, match="clip_ratio_hi"):
        policy_loss.compute("vanilla", **four, clip_ratio_hi=0.3)


def test_value_loss() -> None:
    gen = torch.Generator().manual_seed(2)
    old, returns = randn(gen, 5, 8), 2 * randn(gen, 5, 8)
    values = (old + randn(gen, 5, 8)).requires_grad_()
    weights = torch.rand(5, 8, generator=gen, dtype=torch.float64)
    clip, want, want_frac = 0.4, 0.0, 0.0
    for v, o, r, w in zip(values.detach().flatten(), old.flatten(), returns.flatten(), weights.flatten(), strict=True):
        near = min(max(float(v), float(o) - clip), float(o) + clip)
        plain, clipped = (float(v) - float(r)) ** 2, (near - float(r)) ** 2
        want += 0.5 * float(w) * max(plain, clipped)
        want_frac += float(w) * (clipped > plain)

    def loss(v: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return value_loss.compute(values=v, old_values=old, returns=returns, weights=weights, cliprange_value=clip)

    got, metrics = loss(values)
    assert float(got.detach()) == pytest.approx(want, rel=1e-12)
    assert float(metrics["vf_clipfrac"]) == pytest.approx(want_frac, rel=1e-12) and want_frac > 0
    assert torch.autograd.gradcheck(lambda v: loss(v)[0], (values,))


def test_value_loss_inside_the_clip_is_plain_regression_in_float32() -> None:
    gen = torch.Generator().manual_seed(6)
    old = 0.4 * torch.rand(1000, generator=gen) - 0.2
    values = (0.4 * torch.rand(1000, generator=gen) - 0.2).requires_grad_()  # old + (values - old) would round
    returns, weights = torch.randn(1000, generator=gen), torch.full((1000,), 1e-3)
    loss, metrics = value_loss.compute(values=values, old_values=old, returns=returns, weights=weights)
    loss.backward()
    assert float(metrics["vf_clipfrac"]) == 0
    torch.testing.assert_close(values.grad, weights * (values.detach() - returns))


def test_value_loss_refuses_what_does_not_fit() -> None:
    four = dict.fromkeys(["values", "old_values", "returns", "weights"], torch.zeros(4))
    with pytest.raises(ValueError, match="cliprange_value must be > 0"):
        value_loss.compute(**four, cliprange_value=0.0)
    with pytest.raises(ValueError, match=r"returns \[2, 2\]"):
        value_loss.compute(**(four | {"returns": torch.zeros(2, 2)}))


KL_FORMULAS: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "kl": lambda d: d,
    "abs": abs,
    "k2": lambda d: d * d / 2,
    "mse": lambda d: d * d / 2,
    "k3": lambda d: min(math.exp(min(-d, 20.0)) + d - 1, 10.0) if d < 20 else 10.0,
    "low_var_kl": lambda d: min(math.exp(min(-d, 20.0)) + d - 1, 10.0) if d < 20 else 10.0,
}


@pytest.mark.parametrize("name", sorted(KL_FORMULAS))
@pytest.mark.parametrize("spread", [0.01, 1.0, 40.0])
def test_kl_penalty(name: str, spread: float) -> None:
    gen = torch.Generator().manual_seed(9)
    log_probs = randn(gen, 7, 30)
    ref = log_probs + spread * randn(gen, 7, 30)
    want = [
        [KL_FORMULAS[name](float(a - b)) for a, b in zip(x, y, strict=True)]
        for x, y in zip(log_probs, ref, strict=True)
    ]
    got = kl.penalty(name, log_probs, ref)
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "slope"), [("k1", lambda d: 1 + 0 * d), ("k2", lambda d: d), ("k3", lambda d: 1 - (-d).exp())]
)
def test_kl_gradient_flows_to_the_policy_only(name: str, slope: Callable[[Tensor], Tensor]) -> None:
    gen = torch.Generator().manual_seed(10)
    log_probs = (0.5 * randn(gen, 50)).requires_grad_()
    ref = (0.5 * randn(gen, 50)).requires_grad_()  # k3 stays below its bound, above which its gradient is 0
    kl.penalty(name, log_probs, ref).sum().backward()
    torch.testing.assert_close(log_probs.grad, slope((log_probs - ref).detach()))
    assert ref.grad is None
    assert torch.autograd.gradcheck(lambda x: kl.penalty(name, x, ref), (log_probs,))


def test_k3_keeps_its_digits_for_a_tiny_divergence_in_float32() -> None:
    log_probs = torch.tensor([-1.0])
    ref = torch.tensor([-1.0 + 2.0**-14])
    d = 2.0**-14
    assert float(kl.penalty("k3", log_probs, ref)) == pytest.approx(d * d / 2 + d**3 / 6, rel=1e-3)


def test_unknown_kl_penalty() -> None:
    with pytest.raises(ValueError, match="unknown KL penalty 'k4'"):
        kl.penalty("k4", torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="shapes differ"):
        kl.penalty("k1", torch.zeros(2), torch.zeros(1))


def test_adaptive_controller() -> None:
    controller = kl.AdaptiveController(0.1, target=6.0, horizon_samples=1000)
    controller.update(6.6, 100)  # +10% over a tenth of the horizon
    assert controller.value == pytest.approx(0.1 * 1.01)
    controller.update(1000.0, 100)  # bounded at +20%
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(0.0, 500)  # bounded at -20%
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.9)

    resumed = kl.make_controller("adaptive", coef=0.1, target=6.0, horizon_samples=1000)
    resumed.load_state_dict(controller.state_dict())
    resumed.update(5.0, 10)
    controller.update(5.0, 10)
    assert resumed.value == controller.value


def test_fixed_controller_stays_at_the_configured_value() -> None:
    controller = kl.make_controller("fixed", coef=0.01, target=None, horizon_samples=None)
    controller.update(99.0, 512)
    controller.load_state_dict({"value": 5.0})
    assert controller.value == 0.01


def test_controllers_refuse_missing_and_unknown_settings() -> None:
    with pytest.raises(ValueError, match="needs target and horizon_samples"):
        kl.make_controller("adaptive", coef=0.1, target=6.0, horizon_samples=None)
    with pytest.raises(ValueError, match="unknown KL controller 'adaptiv'"):
        kl.make_controller("adaptiv", coef=0.1, target=6.0, horizon_samples=1)
    with pytest.raises(ValueError, match="must be > 0"):
        kl.AdaptiveController(0.1, target=6.0, horizon_samples=0)


def agg_reference(mode: str, loss: Tensor, mask: Tensor) -> float:
    rows = [[float(x) for x, m in zip(lr, mr, strict=True) if m] for lr, mr in zip(loss, mask, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    return sum(sum(row) / len(row) for row in rows) / len(rows)


def holed_mask(gen: torch.Generator, rows: int, length: int) -> Tensor:
    mask = torch.rand(rows, length, generator=gen) < torch.rand(rows, 1, generator=gen)
    mask[0] = False
    return mask


@pytest.mark.parametrize("mode", MODES)
def test_aggregation(mode: str) -> None:
    gen = torch.Generator().manual_seed(12)
    for rows, length in [(1, 1), (3, 4), (20, 50)]:
        mask, loss = holed_mask(gen, rows, length), randn(gen, rows, length)
        loss[~mask] = math.nan
        want = agg_reference(mode, loss, mask)
        assert float(aggregate.agg_loss(mode, loss, mask)) == pytest.approx(want, rel=1e-5, abs=1e-12)
        weights = aggregate.token_weights(mode, mask.long())
        assert weights.dtype == torch.float32 and (weights[~mask] == 0).all()
        assert float((weights * loss.masked_fill(~mask, 0)).sum()) == pytest.approx(want, rel=1e-5, abs=1e-12)


def test_token_mean_weights_sum_to_one() -> None:
    mask = torch.ones(700, 333, dtype=torch.bool)
    assert float(aggregate.token_weights("token-mean", mask).sum()) == pytest.approx(1, rel=1e-5)


def test_aggregation_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="unknown loss aggregation mode 'token_mean'; did you mean 'token-mean'"):
        aggregate.token_weights("token_mean", torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"must be \[B, T\]"):
        aggregate.token_weights("token-mean", torch.ones(3))
    with pytest.raises(ValueError, match="shapes differ"):
        aggregate.agg_loss("token-mean", torch.ones(2, 4), torch.ones(2, 3))


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_does_not_depend_on_how_a_mini_batch_is_split(mode: str) -> None:
    gen = torch.Generator().manual_seed(13)
    rows, length = 12, 15
    mask = holed_mask(gen, rows, length)
    old, adv, ref = randn(gen, rows, length), randn(gen, rows, length), randn(gen, rows, length)
    parameter = (old + 0.3 * randn(gen, rows, length)).requires_grad_()
    weights = aggregate.token_weights(mode, mask).double()

    def loss(part: Tensor) -> Tensor:
        """Returns the loss of the tokens in `part`, as flat tensors."""
        lp, w = parameter[part], weights[part]
        policy, _ = policy_loss.compute(
            "vanilla", log_probs=lp, old_log_probs=old[part], advantages=adv[part], weights=w
        )
        value, _ = value_loss.compute(values=lp, old_values=old[part], returns=adv[part], weights=w)
        return policy + value + 0.1 * (w * kl.penalty("k3", lp, ref[part])).sum()

    (whole,) = torch.autograd.grad(loss(mask), parameter)
    assert whole.abs().sum() > 0
    for parts in (1, 2, 5, 30):
        owner = torch.randint(0, parts, (rows, length), generator=gen)  # by tokens, as with context parallelism
        total = torch.zeros_like(whole)
        for part in range(parts):
            total += torch.autograd.grad(loss(mask & (owner == part)), parameter)[0]
        torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-14)
