"""Losses in one pass over blocks of tokens, against their composed forms, which other tests compare with formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrl.algo import policy_loss
from mrl.algo.policy_loss import LOSSES
from mrl.kernels import clipped_loss

pytestmark = pytest.mark.usefixtures("each_form")

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipped_loss, "BLOCK", 64)


def tokens(n: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Returns log-ratios, some of them far apart, with zeros among advantages and weights."""
    gen = torch.Generator().manual_seed(n)
    old, advantages, noise = torch.randn(3, n, generator=gen, dtype=torch.float64)
    advantages[::7] = 0
    weights, metric_weights = torch.rand(2, n, generator=gen, dtype=torch.float64) / n
    weights[1::5] = 0
    made = {"old_log_probs": old, "advantages": advantages, "weights": weights, "metric_weights": metric_weights}
    made["log_probs"] = old + noise * torch.where(torch.arange(n) % 11 == 0, 1.5, 0.15)
    return {name: x.to(dtype) for name, x in made.items()}


def both(inputs: dict[str, Tensor], ceiling: float) -> list[list[Tensor]]:
    """Returns [loss, its gradient, each metric], in one pass and composed."""
    made = []
    for form in ("vanilla", LOSSES.get("vanilla")):
        leaf = inputs["log_probs"].clone().requires_grad_()
        loss, metrics = policy_loss.compute(form, **inputs | {"log_probs": leaf}, **CLIP, clip_ratio_c=ceiling)
        (3 * loss).backward()
        assert leaf.grad is not None and list(metrics) == list(policy_loss.COMMON_METRICS)
        made.append([loss.detach(), leaf.grad, *metrics.values()])
    return made


@pytest.mark.parametrize("n", [1, 64, 300])
@pytest.mark.parametrize("ceiling", [1.2, 3.0])
def test_the_clipped_loss_is_that_of_its_composed_form(n: int, ceiling: float) -> None:
    inputs = tokens(n)
    one_pass, composed = both(inputs, ceiling)
    exact = both({name: x.double() for name, x in inputs.items()}, ceiling)[1]
    for mine, theirs, want in zip(one_pass, composed, exact, strict=True):
        assert mine.dtype == torch.float32
        rounding = 1e-7 * (1 if want.ndim == 0 else 1 / n)  # relative to the sum's terms, which cancel
        torch.testing.assert_close(mine.double(), want, rtol=1e-6, atol=rounding)
        torch.testing.assert_close(theirs.double(), want, rtol=1e-6, atol=rounding)
    if n == 300:
        assert one_pass[2] > 0 and one_pass[4] > 0, "the clip and the ceiling are at work"


def test_a_token_is_clipped_alike_whatever_its_neighbours_are() -> None:
    """A token is clipped independently of its neighbours: the head computes gradients by chunks of tokens, which must
    equal those of the whole even exactly at a bound."""
    ends = torch.tensor([0.8, 1.28, 3.0], dtype=torch.float64).log().float()
    steps = torch.arange(-40, 40)[:, None] * torch.finfo(torch.float32).eps / 4
    log_ratios = torch.cat([(ends + steps).flatten(), torch.tensor([9.0, -9.0, 21.0])])  # these are in the last block
    n = log_ratios.numel()
    advantages = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)

    def gradient(rows: slice) -> Tensor:
        leaf, ones = log_ratios[rows].clone().requires_grad_(), torch.ones_like(log_ratios[rows])
        inputs = {"old_log_probs": 0 * ones, "advantages": advantages[rows], "weights": ones}
        loss, _ = policy_loss.compute("vanilla", log_probs=leaf, **inputs, **CLIP, clip_ratio_c=3.0)
        (found,) = torch.autograd.grad(loss, leaf)
        return found

    whole = gradient(slice(0, n))
    assert 0 < int((whole == 0).sum()) < n
    for size in (1, 7, 60, 65):
        parts = [gradient(slice(start, start + size)) for start in range(0, n, size)]
        assert torch.equal(torch.cat(parts), whole)


def test_ratios_far_from_1_and_what_is_no_number_keep_to_their_token() -> None:
    inputs = tokens(300)
    inputs["log_probs"][:3] = inputs["old_log_probs"][:3] + torch.tensor([-30.0, 30.0, -9.0])
    one_pass, composed = both(inputs, 3.0)
    for mine, theirs in zip(one_pass, composed, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9 if mine.ndim else 1e-7)
    inputs["log_probs"][130] = torch.nan
    one_pass, composed = both(inputs, 3.0)
    assert one_pass[0].isnan(), "no update is made of it"
    torch.testing.assert_close(one_pass[1], composed[1], rtol=1e-6, atol=1e-9)


def test_the_gradient_of_each_block_is_right() -> None:
    inputs = tokens(150, torch.float64)
    leaf = inputs.pop("log_probs").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss.compute("vanilla", log_probs=x, **inputs)[0], (leaf,))


def test_no_tokens_cost_nothing() -> None:
    inputs = {name: x[:0] for name, x in tokens(1).items()}
    loss, gradient, *metrics = both(inputs, 3.0)[0]
    assert loss == 0 and gradient.shape == (0,) and not any(metrics)
