"""Advantages and PPO's loss by triton's interpreter, against the torch forms: `make test-triton`."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs triton and TRITON_INTERPRET=1: make test-triton", allow_module_level=True)

from mrl.algo import advantages, stats  # noqa: E402
from mrl.kernels import algo_triton, clipped_loss, triton_support  # noqa: E402

COLUMNS = 16


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algo_triton, "_COLUMNS", COLUMNS)


def both(monkeypatch: pytest.MonkeyPatch, made: Any) -> tuple[Any, Any]:
    """By triton, and by torch in float64."""
    monkeypatch.setattr(triton_support, "supports", lambda *x: all(y.dtype == torch.float32 for y in x))
    got = made(torch.float32)
    monkeypatch.undo()
    return got, made(torch.float64)


@pytest.mark.parametrize("length", [1, COLUMNS - 1, COLUMNS, COLUMNS + 1, 5 * COLUMNS + 3])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("shift_mean", [True, False])
def test_advantages(length: int, holes: bool, shift_mean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked values are NaN, so that reading one would show. One row is masked whole, another not at all."""
    gen = torch.Generator().manual_seed(length)
    rewards, values = torch.randn(2, 6, length, generator=gen, dtype=torch.float64)
    mask = torch.arange(length) < torch.tensor([0, 1, length // 2, length, length, length])[:, None]
    if holes:
        mask &= torch.rand(6, length, generator=gen) < 0.6
        mask[3] = True
    rewards, values = (x.masked_fill(~mask, torch.nan) for x in (rewards, values))

    def made(dtype: torch.dtype) -> list[Tensor]:
        given = {"token_rewards": rewards.to(dtype), "values": values.to(dtype), "group": torch.arange(6)}
        options = {"gamma": 0.97, "lam": 0.95, "whiten_shift_mean": shift_mean}
        return list(advantages.compute("gae", response_mask=mask, **given, **options))

    got, want = both(monkeypatch, made)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-6)
        assert not mine[~mask].any()


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_whitening_of_what_is_far_from_zero(apart: float) -> None:
    """All alike, where rounding must not make a variance below 0; or apart by 1 of 30,000."""
    values = torch.full((4, 100), 30000.0) + apart * torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(values, dtype=torch.bool)
    wide = values.double()
    moments = torch.stack([mask.sum().double(), wide.sum(), wide.square().sum()])
    x = values.clone()
    algo_triton.whiten_(x, mask, moments, 1e-8, True)
    want = stats.whiten(wide, mask) if apart else torch.zeros_like(wide)
    torch.testing.assert_close(x.double(), want, rtol=2e-3, atol=1e-2)


def test_a_value_that_is_not_a_number_spoils_what_is_before_it_alone() -> None:
    mask, values = torch.ones(2, 40, dtype=torch.bool), torch.zeros(2, 40)
    values[0, 20] = torch.nan
    found, _, _ = algo_triton.gae(torch.ones(2, 40), values, mask, 1.0, 0.9)
    assert found[0, :21].isnan().all() and not found[0, 21:].isnan().any() and not found[1].isnan().any()


@pytest.mark.parametrize("n", [1, COLUMNS, 7 * COLUMNS + 5])
@pytest.mark.parametrize("ceiling", [1.5, 3.0])
def test_the_clipped_loss(n: int, ceiling: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, metrics and gradient; some tokens are clipped, some at the ceiling, one is beyond what is clamped."""
    gen = torch.Generator().manual_seed(n)
    old, advantage, weight, of_metrics, apart = torch.randn(5, n, generator=gen, dtype=torch.float64)
    apart[0] = 30.0
    clip = clipped_loss.Clip(0.2, 0.28, ceiling, 20.0)

    def made(dtype: torch.dtype) -> list[Tensor]:
        leaf = (old + apart).to(dtype).requires_grad_()
        rest = [x.to(dtype) for x in (old, advantage, weight.abs() / n, of_metrics.abs() / n)]
        loss, metrics = clipped_loss.clipped_loss(leaf, *rest, clip)
        (gradient,) = torch.autograd.grad(3 * loss, leaf)
        return [loss.detach(), metrics, gradient]

    got, want = both(monkeypatch, made)
    assert want[2][0] == 0 and (n == 1 or want[1][0] > 0)
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine.double(), theirs, rtol=3e-6, atol=1e-6)


def test_a_log_prob_that_is_not_a_number_spoils_the_loss_and_has_no_gradient() -> None:
    vectors = [torch.zeros(40) for _ in range(5)]
    vectors[0][7] = torch.nan
    vectors[2][:], vectors[3][:] = 1.0, 1.0
    sums, gradient = algo_triton.clipped_loss(vectors, (0.2, 0.2, 3.0, 20.0))
    assert sums[0].isnan() and gradient[7] == 0 and not gradient.isnan().any()
