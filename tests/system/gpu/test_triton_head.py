"""The head's triton kernels, by triton's interpreter, against float64 and the torch form: `make test-triton`, in an
environment of their own. SGLang on a CPU would take a triton in the usual one for a GPU's."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs triton and TRITON_INTERPRET=1: make test-triton", allow_module_level=True)

from mrl.algo import log_probs  # noqa: E402
from mrl.kernels import head_rows, head_rows_triton  # noqa: E402
from mrl.kernels.linear_logprob import LossGradients, linear_distribution, linear_log_prob  # noqa: E402


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several pieces, the last of which is not full."""
    monkeypatch.setattr(head_rows, "by_triton", lambda x: True)
    monkeypatch.setattr(head_rows_triton, "_COLUMNS", 16)


def logits(level: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns logits of 8 rows and 50 words, with labels (7) that are nearly certain, likely and nearly impossible."""
    made = level + torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    made[:4, 7] = level + torch.tensor([12.0, 14.0, 9.0, 20.0])
    made[4, 7] = level - 60
    return made.to(dtype)


LABELS = torch.full((8,), 7)


@pytest.mark.parametrize("level", [0.0, 100.0, -100.0])
def test_log_probs_are_right_to_a_millionth_and_none_is_above_0(level: float) -> None:
    x = logits(level)
    got, entropy, squares, is_top = linear_distribution(torch.eye(8), x.T.contiguous(), LABELS, 1.0, 0, 50, chunk=3)
    want, wanted_entropy = log_probs.compute(x.double(), LABELS)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=2e-6, atol=0)
    torch.testing.assert_close(squares.double(), x.double().softmax(-1).square().sum(-1), rtol=1e-6, atol=0)
    assert torch.equal(is_top.bool(), x.argmax(-1) == LABELS)
    assert want.max() > -1e-5 and (got <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradients_are_those_of_log_softmax(dtype: torch.dtype, with_entropy: bool) -> None:
    """Gradients of hidden states and weight, with a padded vocabulary and a temperature. Without an entropy term they
    are computed in the forward pass."""
    gen = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(7, 5, generator=gen).to(dtype), 3 * torch.randn(53, 5, generator=gen).to(dtype)
    labels, slope = torch.randint(0, 50, (7,), generator=gen), torch.randn(7, generator=gen)

    def gradients(h: Tensor, w: Tensor, exact: bool) -> tuple[Tensor, ...]:
        leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
        if exact:
            found, entropy = log_probs.compute(leaves[0] @ leaves[1][:50].T, labels, 0.7)
        else:
            loss_gradients = (
                None if with_entropy else LossGradients(lambda log_probs, entropies, rows: (slope[rows], None))
            )
            found, entropy, _ = linear_log_prob(*leaves, labels, 0.7, 0, 50, chunk=3, loss_gradients=loss_gradients)
        loss = (slope.to(found.dtype) * found).sum() + 0.3 * (entropy if with_entropy else entropy.detach()).sum()
        return torch.autograd.grad(loss, leaves)

    wanted = gradients(hidden.double(), weight.double(), True)
    bound = 2e-6 if dtype == torch.float32 else 2.0**-5
    for mine, want in zip(gradients(hidden, weight, False), wanted, strict=True):
        assert mine.dtype == dtype and (mine.double() - want).norm() < bound * want.norm()


def test_a_rank_has_a_part_of_the_vocabulary() -> None:
    """The sums of two ranks, combined as the collective does, equal those of the whole vocabulary."""
    x = logits(3.0)
    whole, (total, weighted, _) = head_rows_triton.sums(x, 0.5)
    tops, made = zip(*(head_rows_triton.sums(part, 0.5) for part in (x[:, :20], x[:, 20:])))
    below = (torch.stack(tops) - whole).double() / 0.5
    scale = below.exp()
    parts = torch.stack(made)
    torch.testing.assert_close((scale * parts[:, 0]).sum(0), total, rtol=1e-6, atol=0)
    torch.testing.assert_close((scale * (parts[:, 1] + below * parts[:, 0])).sum(0), weighted, rtol=1e-6, atol=1e-6)
