"""Divergences and their gradients equal the papers' formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrl.kernels import linear_divergence as kernel
from mrl.kernels.linear_divergence import Divergence, TopTokens, linear_divergence
from tests.helpers.divergences import DIVERGENCES, by_the_papers, top_outcomes

pytestmark = pytest.mark.usefixtures("each_form")

N, VOCAB, T = 7, 30, 0.7


def numbers(dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Returns the student's hidden states and weight, the teacher's, and token weights. Three ids are padding."""
    gen = torch.Generator().manual_seed(3)
    shapes = (N, 5), (VOCAB + 3, 5), (N, 9), (VOCAB + 3, 9)
    made = [(scale * torch.randn(*shape, generator=gen)).bfloat16().to(dtype) for shape in shapes]
    weights = torch.rand(N, generator=gen).to(dtype)
    weights[2] = 0
    return *(x.requires_grad_() for x in made[:2]), *made[2:], weights


def reference(kind: str, mix: float, scale: float = 1.0) -> tuple[Tensor, tuple[Tensor, ...]]:
    h, w, g, v, weights = numbers(torch.float64, scale)
    q, p = (((x @ y[:VOCAB].T) / T).softmax(-1) for x, y in ((h, w), (g, v)))
    found = by_the_papers(kind, mix, p, q)
    return found.detach(), torch.autograd.grad(3 * (weights * found).sum(), (h, w))


@pytest.mark.parametrize("chunk", [2, None])
@pytest.mark.parametrize(("kind", "mix"), DIVERGENCES)
def test_it_equals_the_formula_and_so_do_its_gradients(
    kind: str, mix: float, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 3 * (VOCAB + 3))  # blocks that do not divide the rows
    wanted, gradients = reference(kind, mix)
    assert wanted.min() > 1e-3 and all(each.abs().max() > 1e-2 for each in gradients)
    h, w, g, v, weights = numbers(torch.float32)
    found = linear_divergence(h, w, (g, v), Divergence(kind, mix), weights, T, 0, VOCAB, chunk=chunk)
    torch.testing.assert_close(found.detach().double(), wanted, rtol=1e-5, atol=1e-7)
    for got, want in zip(torch.autograd.grad(3 * (weights * found).sum(), (h, w)), gradients, strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 1e-5
    assert not w.grad


@pytest.mark.parametrize(("kind", "mix"), DIVERGENCES)
def test_probabilities_that_vanish_give_finite_numbers(kind: str, mix: float) -> None:
    """Vanishing probabilities give finite numbers. With logits of hundreds, most probabilities are 0 in float32."""
    wanted, gradients = reference(kind, mix, scale=16.0)
    h, w, g, v, weights = numbers(torch.float32, scale=16.0)
    found = linear_divergence(h, w, (g, v), Divergence(kind, mix), weights, T, 0, VOCAB)
    if wanted.isfinite().all():
        torch.testing.assert_close(found.detach().double(), wanted, rtol=1e-4, atol=1e-5)
    assert found.isfinite().all()
    for got in torch.autograd.grad(3 * (weights * found).sum(), (h, w)):
        assert got.isfinite().all()


def top_tokens(top_k: int, scale: float = 1.0) -> TopTokens:
    """Returns the teacher's top tokens, computed in float64."""
    _, _, g, v, _ = numbers(torch.float64, scale)
    found = ((g @ v[:VOCAB].T) / T).log_softmax(-1).topk(top_k, -1)
    return TopTokens(found.indices, found.values.float())


@pytest.mark.parametrize("chunk", [2, None])
@pytest.mark.parametrize(("kind", "mix"), DIVERGENCES)
def test_top_tokens_equal_the_formula_of_their_outcomes(
    kind: str, mix: float, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 3 * (VOCAB + 3))
    h, w, g, v, weights = numbers(torch.float64)
    q, p = (((x @ y[:VOCAB].T) / T).softmax(-1) for x, y in ((h, w), (g, v)))
    wanted = by_the_papers(kind, mix, *top_outcomes(p, q, 4))
    gradients = torch.autograd.grad(3 * (weights * wanted).sum(), (h, w))
    whole, _ = reference(kind, mix)
    assert (wanted < whole).all() and (whole - wanted).max() > 0.01, "merging outcomes loses information"
    h, w, _, _, weights = numbers(torch.float32)
    found = linear_divergence(h, w, top_tokens(4), Divergence(kind, mix), weights, T, 0, VOCAB, chunk=chunk)
    torch.testing.assert_close(found.detach().double(), wanted.detach(), rtol=1e-5, atol=1e-7)
    for got, want in zip(torch.autograd.grad(3 * (weights * found).sum(), (h, w)), gradients, strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 1e-5


@pytest.mark.parametrize(("kind", "mix"), DIVERGENCES)
def test_top_tokens_of_the_whole_vocabulary_are_the_divergence_itself(kind: str, mix: float) -> None:
    """Top tokens of the whole vocabulary give the full divergence, up to the minimum probability of the remainder.
    Missing entries of a row, and ids that the student lacks, count for nothing."""
    wanted, _ = reference(kind, mix)
    h, w, _, _, weights = numbers(torch.float32)
    top = top_tokens(VOCAB)
    lacks = torch.full((N, 1), -1), torch.full((N, 1), VOCAB + 1)
    top = TopTokens(torch.cat([top.ids, *lacks], 1), torch.cat([top.log_probs, torch.full((N, 2), -3.0)], 1))
    found = linear_divergence(h, w, top, Divergence(kind, mix), weights, T, 0, VOCAB)
    torch.testing.assert_close(found.detach().double(), wanted, rtol=1e-3, atol=1e-4)
    assert all(each.isfinite().all() for each in torch.autograd.grad((weights * found).sum(), (h, w)))


@pytest.mark.parametrize(("kind", "mix"), DIVERGENCES)
def test_top_tokens_whose_probabilities_vanish_give_finite_numbers(kind: str, mix: float) -> None:
    h, w, _, _, weights = numbers(torch.float32, scale=16.0)
    found = linear_divergence(h, w, top_tokens(4, 16.0), Divergence(kind, mix), weights, T, 0, VOCAB)
    assert found.isfinite().all()
    assert all(each.isfinite().all() for each in torch.autograd.grad((weights * found).sum(), (h, w)))


def test_a_frozen_weight_gets_no_gradient_and_equal_models_have_no_divergence() -> None:
    h, w, _, _, weights = numbers(torch.float32)
    for kind, mix in DIVERGENCES:
        own = (h.detach(), w.detach())
        found = linear_divergence(h, w.detach(), own, Divergence(kind, mix), weights, T, 0, VOCAB)
        assert float(found.detach().abs().max()) < 1e-6
        (gradient,) = torch.autograd.grad((weights * found).sum(), h)
        assert float(gradient.abs().max()) < 1e-6


def test_a_loss_with_other_weights_is_refused() -> None:
    h, w, g, v, weights = numbers(torch.float32)
    found = linear_divergence(h, w, (g, v), Divergence("jsd"), weights, T, 0, VOCAB)
    with pytest.raises(RuntimeError, match="differ from those used in the forward pass"):
        (weights.flip(0) * found).sum().backward()


def test_no_rows() -> None:
    h, w, g, v, weights = numbers(torch.float32)
    found = linear_divergence(h[:0], w, (g[:0], v), Divergence("reverse_kl"), weights[:0], T, 0, VOCAB)
    assert found.shape == (0,)
    assert not torch.autograd.grad(found.sum(), w)[0].any()
