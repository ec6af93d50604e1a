"""Log-probs and entropies of the fused kernel stay accurate at large logits. For tensor parallelism see
tests/distributed/models/test_models.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mrl.algo import log_probs
from mrl.kernels import head_products, linear_logprob
from mrl.kernels.linear_logprob import LossGradients, linear_distribution, linear_log_prob

pytestmark = pytest.mark.usefixtures("each_form")


def at_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Runs the kernel with exactly these logits: hidden states are the identity; chunks do not divide the rows."""
    made = linear_log_prob(torch.eye(len(logits)), logits.T.contiguous(), labels, 1.0, 0, logits.shape[1], chunk=3)
    assert torch.equal(made[2].bool(), logits.gather(1, labels[:, None])[:, 0] == logits.amax(-1))
    return made[:2]


@pytest.mark.parametrize("level", [0.0, 100.0, -100.0])
def test_log_probs_are_right_to_a_millionth(level: float) -> None:
    """Log-probs are accurate to a millionth for labels that are nearly certain, likely, and very unlikely."""
    gen = torch.Generator().manual_seed(0)
    logits = level + torch.randn(8, 50, generator=gen)
    logits[:4, 7] = level + torch.tensor([12.0, 14.0, 9.0, 20.0])
    logits[4, 7] = level - 60
    labels = torch.full((8,), 7)
    got, entropy = at_logits(logits, labels)
    want, wanted_entropy = log_probs.compute(logits.double(), labels)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=2e-6, atol=0)
    assert want.max() > -1e-5 and (got <= 0).all()
    distribution = linear_distribution(torch.eye(8), logits.T.contiguous(), labels, 1.0, 0, 50, chunk=3)
    assert torch.equal(distribution[:2], torch.stack([got, entropy]))
    squares = logits.double().softmax(-1).square().sum(-1)
    torch.testing.assert_close(distribution[2].double(), squares, rtol=1e-6, atol=0)
    assert torch.equal(distribution[3].bool(), logits.argmax(-1) == labels)


def test_the_example_of_a_logit_of_100() -> None:
    logits = torch.tensor([[100.0, 90.8]])
    want = float(torch.log_softmax(logits.double(), -1)[0, 0])
    assert float(at_logits(logits, torch.tensor([0]))[0]) == pytest.approx(want, rel=1e-6)
    assert want == pytest.approx(-1.0104e-4, rel=1e-3)


def test_equal_and_extreme_logits() -> None:
    logits = torch.tensor([[100.0] * 4, [-3e4, 3e4, -3e4, -3e4], [0.0, -1e30, -1e30, -1e30]])
    got, entropy = at_logits(logits, torch.tensor([2, 1, 0]))
    assert got.tolist() == [pytest.approx(-1.3862944), 0.0, 0.0]
    assert entropy.tolist() == [pytest.approx(1.3862944), 0.0, 0.0]


ADVANTAGES = torch.randn(7, generator=torch.Generator().manual_seed(2))


def clipped(log_probs: Tensor, entropy: Tensor, rows: slice = slice(None)) -> Tensor:
    """A loss like PPO's: constant for some tokens, else of ratio and entropy."""
    advantages = ADVANTAGES[rows].to(log_probs.dtype)
    ratio = 2 * (0.1 * log_probs).exp()
    return (torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.6, 1.2)) - 0.1 * entropy).sum()


def slopes_of(loss: Callable[[Tensor, Tensor, slice], Tensor], entropy: bool) -> LossGradients:
    def of(log_probs: Tensor, entropies: Tensor, rows: slice) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad():
            found = log_probs.clone().requires_grad_(), entropies.clone().requires_grad_()
            d_log_probs, d_entropies = torch.autograd.grad(loss(*found, rows), found)
        return d_log_probs, d_entropies if entropy else None

    return LossGradients(of, entropy)


def numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden, weight, labels. The last three rows of the weight are padding."""
    gen = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(7, 5, generator=gen), 3 * torch.randn(33, 5, generator=gen)
    labels = torch.randint(0, 30, (7,), generator=gen)
    return (*(x.bfloat16().to(dtype).requires_grad_() for x in (hidden, weight)), labels)  # type: ignore[return-value]


def gradients(dtype: torch.dtype, entropy: bool, chunk: int = 2, **how: Any) -> tuple[Tensor, ...]:
    """Returns the gradients of hidden and weight for 3 * the loss; dtype float64 uses plain torch."""
    h, w, labels = numbers(dtype)
    if dtype == torch.float64:
        log_p, entropies = log_probs.compute((h @ w[:30].T), labels, 0.7)
    else:
        log_p, entropies, _ = linear_log_prob(h, w, labels, 0.7, 0, 30, chunk=chunk, **how)
    loss = 3 * clipped(log_p, entropies if entropy else entropies.detach())
    return torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize("entropy", [False, True])
def test_gradients_are_those_of_log_softmax(entropy: bool) -> None:
    """Gradients equal those of log_softmax, computed with the log-probs or from recomputed logits."""
    wanted = gradients(torch.float64, entropy)
    assert all(gradient.abs().max() > 0.01 for gradient in wanted)
    formed = gradients(torch.float32, entropy, loss_gradients=slopes_of(clipped, entropy))
    for got in (formed, gradients(torch.float32, entropy)):
        for mine, want in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))


@pytest.mark.parametrize("chunk", [2, 7])
@pytest.mark.parametrize("entropy", [False, True])
def test_bfloat16_costs_its_own_rounding_only(entropy: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 costs only its own rounding. If products are in float32, only results are rounded; if the processor
    multiplies bfloat16, logits and their gradients are rounded too."""
    wanted = gradients(torch.float64, entropy)
    for is_wide, bound in ((True, 2.0**-8), (False, 2.0**-5)):
        monkeypatch.setattr(head_products, "has_bfloat16", lambda is_wide=is_wide: not is_wide)
        for how in ({}, {"loss_gradients": slopes_of(clipped, entropy)}):
            for mine, want in zip(gradients(torch.bfloat16, entropy, chunk, **how), wanted, strict=True):
                assert mine.dtype == torch.bfloat16
                assert (mine.double() - want).norm() < bound * want.norm(), is_wide


class AsOnGpu(head_products.PlainProducts):
    """bfloat16 operands with float32 logits, whose gradients' products can be deferred, as on a GPU."""

    last: ClassVar[AsOnGpu]

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        super().__init__(hidden, weight)
        self.logits_dtype, self.waits = torch.float32, True
        self.multiplied: list[int] = []
        AsOnGpu.last = self

    def add_d_weight(self, total: Tensor | None, dx: Tensor, rows: slice) -> Tensor:
        assert rows.stop - rows.start == len(dx)
        self.multiplied.append(len(dx))
        return super().add_d_weight(total, dx, rows)


@pytest.mark.parametrize(("at_once", "products"), [(2, [2, 2, 2, 1]), (4, [4, 3]), (6, [6, 1]), (7, [7])])
@pytest.mark.parametrize("entropy", [False, True])
def test_products_of_gradients_wait_for_several_chunks(
    at_once: int, products: list[int], entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_logprob, "waiting_rows", lambda *_: at_once)
    wanted = gradients(torch.float64, entropy)
    for how in ({}, {"loss_gradients": slopes_of(clipped, entropy)}):
        made = gradients(torch.bfloat16, entropy, products=AsOnGpu, **how)
        assert AsOnGpu.last.multiplied == products
        for mine, want in zip(made, wanted, strict=True):
            assert mine.dtype == torch.bfloat16 and (mine.double() - want).norm() < 2.0**-5 * want.norm()


def test_nothing_waits_for_a_frozen_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_logprob, "waiting_rows", lambda *_: pytest.fail("waits"))
    h, w, labels = numbers(torch.bfloat16)
    log_p, *_ = linear_log_prob(h, w.detach(), labels, 0.7, 0, 30, chunk=2, products=AsOnGpu)
    assert torch.autograd.grad(log_p.sum(), h)[0].isfinite().all()


@pytest.mark.parametrize("each_form", ["torch"], indirect=True)
def test_gradcheck() -> None:
    """Gradients from recomputed logits equal finite differences, and gradients from the forward pass equal those. In
    float64, which the C kernels leave to torch."""
    h, w, labels = numbers(torch.float64)

    def loss(hidden: Tensor, weight: Tensor, **how: Any) -> Tensor:
        log_p, entropies, _ = linear_log_prob(hidden, weight, labels, 0.7, 0, 30, chunk=2, **how)
        return clipped(log_p, entropies)

    assert loss(h, w).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, (h, w))
    found = [
        torch.autograd.grad(loss(h, w, **how), (h, w)) for how in ({}, {"loss_gradients": slopes_of(clipped, True)})
    ]
    for again, formed in zip(*found, strict=True):
        torch.testing.assert_close(formed, again, rtol=1e-11, atol=1e-13)


def test_gradients_that_were_formed_by_another_loss_are_refused() -> None:
    h, w, labels = numbers(torch.float32)

    def formed() -> tuple[Tensor, Tensor]:
        return linear_log_prob(h, w, labels, 0.7, 0, 30, chunk=2, loss_gradients=slopes_of(clipped, False))[:2]

    log_p, entropies = formed()
    with pytest.raises(RuntimeError, match="loss gradients differ"):
        log_p.mean().backward()
    log_p, entropies = formed()
    loss = clipped(log_p, entropies.detach())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()
    log_p, entropies = formed()
    broken = clipped(log_p, entropies.detach()) * torch.nan
    assert torch.autograd.grad(broken, h)[0].isnan().all(), "an update with such gradients is skipped, not a crash"


def test_a_frozen_weight_costs_no_product() -> None:
    h, w, labels = numbers(torch.float32)
    for how in ({}, {"loss_gradients": slopes_of(clipped, False)}):
        with_weight, *_ = linear_log_prob(h, w, labels, 0.7, 0, 30, **how)
        frozen, *_ = linear_log_prob(h, w.detach(), labels, 0.7, 0, 30, products=NoWeightGradient, **how)
        wanted, got = (torch.autograd.grad(clipped(x, torch.zeros(7)), h)[0] for x in (with_weight, frozen))
        assert torch.equal(wanted, got) and got.any()


class NoWeightGradient(head_products.PlainProducts):
    def add_d_weight(self, total: Tensor | None, dx: Tensor, rows: slice) -> Tensor:
        raise AssertionError("a product for nothing")


def test_no_rows_have_gradients_of_zero() -> None:
    h, w, labels = numbers(torch.float32)
    for how in ({}, {"loss_gradients": slopes_of(clipped, False)}):
        log_p, *_ = linear_log_prob(h[:0], w, labels[:0], 0.7, 0, 30, **how)
        d_hidden, d_weight = torch.autograd.grad(log_p.sum(), (h, w))
        assert log_p.shape == (0,) and not d_hidden.any() and not d_weight.any() and d_weight.shape == w.shape


def test_plain_logits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits \[2, 3\] and labels \[3\]"):
        log_probs.compute(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="temperature must be > 0"):
        log_probs.compute(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 0.0)
    half, _ = log_probs.compute(torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))
    assert half.dtype == torch.float32 and half[0] == pytest.approx(-1.3862944)
