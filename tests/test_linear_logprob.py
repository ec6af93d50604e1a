"""Log-probs and entropies of the fused kernel keep their digits at large logits. Under tensor parallelism: see
tests/test_models.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrl.algo import log_probs
from mrl.kernels.linear_logprob import linear_distribution, linear_log_prob


def at_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel with these very logits: the identity for hidden states, in chunks that do not divide them."""
    return linear_log_prob(torch.eye(len(logits)), logits.T.contiguous(), labels, 1.0, 0, logits.shape[1], chunk=3)


@pytest.mark.parametrize("level", [0.0, 100.0, -100.0])
def test_log_probs_are_right_to_a_millionth(level: float) -> None:
    """Of labels that are all but certain, likely and hopeless."""
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


def test_gradients_are_those_of_log_softmax() -> None:
    gen = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(7, 5, generator=gen), 3 * torch.randn(33, 5, generator=gen)
    labels = torch.randint(0, 30, (7,), generator=gen)
    a, b = torch.randn(2, 7, generator=gen)
    grads = []
    for dtype in (torch.float32, torch.float64):
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        if dtype == torch.float32:
            lp, entropy = linear_log_prob(h, w, labels, 0.7, 0, 30, chunk=2)
        else:
            lp, entropy = log_probs.compute(h @ w[:30].T, labels, 0.7)
        grads.append(torch.autograd.grad((a * lp + b * entropy).sum(), (h, w)))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_plain_logits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"logits \[2, 3\] and labels \[3\]"):
        log_probs.compute(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="temperature must be > 0"):
        log_probs.compute(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), 0.0)
    half, _ = log_probs.compute(torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64))
    assert half.dtype == torch.float32 and half[0] == pytest.approx(-1.3862944)
