"""Advantages against token-by-token references in float64, written from the formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mrl.algo import advantages, explained_variance, token_rewards, whiten
from mrl.algo.scan import discounted_suffix_sum


def random_mask(gen: torch.Generator, rows: int, length: int, holes: bool) -> Tensor:
    """Returns a mask with left-aligned lengths from 0 up. With holes, a third of the tokens inside are observations."""
    lens = torch.randint(0, length + 1, (rows,), generator=gen)
    lens[0], lens[-1] = 0, length
    mask = torch.arange(length)[None] < lens[:, None]
    if holes:
        mask &= torch.rand(rows, length, generator=gen) > 0.33
    return mask


def gae_reference(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Computes GAE right to left, one token at a time. A masked token passes on next value and sum unchanged."""
    adv, ret = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for i in range(rewards.shape[0]):
        next_value, running = 0.0, 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[i, t]:
                delta = float(rewards[i, t]) + gamma * next_value - float(values[i, t])
                running = delta + gamma * lam * running
                next_value = float(values[i, t])
                adv[i, t], ret[i, t] = running, running + next_value
    return adv, ret


def whiten_reference(x: Tensor, mask: Tensor) -> Tensor:
    inside = [float(v) for v in x[mask]]
    mean = sum(inside) / (len(inside) + 1e-8)
    var = sum((v - mean) ** 2 for v in inside) / (len(inside) + 1e-8) * len(inside) / (len(inside) - 1)
    out = torch.zeros_like(x)
    out[mask] = (x[mask] - mean) / math.sqrt(var + 1e-8)
    return out


def grpo_reference(rewards: Tensor, mask: Tensor, group: Tensor, norm: bool) -> Tensor:
    scores = [float(row.sum()) for row in rewards]
    out = torch.zeros_like(rewards)
    for i, score in enumerate(scores):
        members = [s for s, g in zip(scores, group.tolist(), strict=True) if g == group[i]]
        if len(members) == 1:
            mean, std = 0.0, 1.0
        else:
            mean = sum(members) / len(members)
            std = math.sqrt(sum((s - mean) ** 2 for s in members) / (len(members) - 1))
        out[i][mask[i]] = (score - mean) / (std + 1e-6) if norm else score - mean
    return out


def compute(name: str, rewards: Tensor, mask: Tensor, **kwargs: object) -> tuple[Tensor, Tensor]:
    kwargs.setdefault("group", torch.arange(rewards.shape[0]))
    return advantages.compute(name, token_rewards=rewards, response_mask=mask, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0), (1.0, 0.5)])
@pytest.mark.parametrize(("rows", "length"), [(3, 1), (5, 17), (4, 128), (3, 129), (6, 300)])
def test_gae(rows: int, length: int, gamma: float, lam: float, holes: bool) -> None:
    gen = torch.Generator().manual_seed(rows * length)
    mask = random_mask(gen, rows, length, holes)
    mask[-1, 0] = mask[1, 0] = True
    rewards = torch.randn(rows, length, generator=gen, dtype=torch.float64)
    values = torch.randn(rows, length, generator=gen, dtype=torch.float64)
    want_adv, want_ret = gae_reference(rewards, values, mask, gamma, lam)
    want_adv = whiten_reference(want_adv, mask)

    adv, ret = compute("gae", rewards, mask, values=values, gamma=gamma, lam=lam)
    torch.testing.assert_close(adv, want_adv, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ret, want_ret, rtol=1e-9, atol=1e-9)
    assert (adv[~mask] == 0).all() and (ret[~mask] == 0).all()

    adv32, ret32 = compute("gae", rewards.float(), mask, values=values.float(), gamma=gamma, lam=lam)
    assert adv32.dtype == torch.float32
    torch.testing.assert_close(adv32.double(), want_adv, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ret32.double(), want_ret, rtol=1e-4, atol=1e-4)


def test_gae_ignores_what_lies_outside_the_mask() -> None:
    gen = torch.Generator().manual_seed(3)
    mask = random_mask(gen, 4, 9, holes=True)
    rewards, values = torch.randn(4, 9, generator=gen), torch.randn(4, 9, generator=gen)
    clean = compute("gae", rewards, mask, values=values, gamma=0.9, lam=0.8)
    dirty = compute(
        "gae",
        rewards.masked_fill(~mask, math.inf),
        mask.long(),
        values=values.masked_fill(~mask, math.nan),
        gamma=0.9,
        lam=0.8,
    )
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)


def test_gae_does_not_change_under_padding_and_permutation() -> None:
    gen = torch.Generator().manual_seed(4)
    mask = random_mask(gen, 6, 20, holes=True)
    rewards = torch.randn(6, 20, generator=gen, dtype=torch.float64)
    values = torch.randn(6, 20, generator=gen, dtype=torch.float64)
    adv, ret = compute("gae", rewards, mask, values=values, gamma=0.9, lam=0.8)

    order = torch.randperm(6, generator=gen)
    moved, moved_ret = compute("gae", rewards[order], mask[order], values=values[order], gamma=0.9, lam=0.8)
    torch.testing.assert_close(moved, adv[order])
    torch.testing.assert_close(moved_ret, ret[order])

    def wider(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 140))

    padded, _ = compute("gae", wider(rewards), wider(mask), values=wider(values), gamma=0.9, lam=0.8)
    torch.testing.assert_close(padded[:, :20], adv)


@pytest.mark.parametrize("valid", [0, 1])
def test_gae_of_a_batch_too_small_to_whiten_is_finite(valid: int) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[0, :valid] = True
    adv, ret = compute("gae", torch.ones(2, 3), mask, values=torch.full((2, 3), 0.25), gamma=1.0, lam=1.0)
    assert torch.equal(adv, torch.zeros(2, 3))
    assert torch.equal(ret, mask.float())


def test_gae_without_values_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="'gae' needs values.*critic"):
        compute("gae", torch.ones(2, 3), torch.ones(2, 3))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("holes", [False, True])
def test_grpo(norm: bool, holes: bool) -> None:
    gen = torch.Generator().manual_seed(11)
    for rows, length in [(2, 1), (9, 5), (40, 33)]:
        mask = random_mask(gen, rows, length, holes)
        group = torch.randint(-3, 8, (rows,), generator=gen) * 1000
        group[1] = 77  # a group of one sample
        rewards = torch.randn(rows, length, generator=gen, dtype=torch.float64)
        want = grpo_reference(rewards, mask, group, norm)
        adv, ret = compute("grpo", rewards, mask, group=group, norm_adv_by_std_in_grpo=norm)
        torch.testing.assert_close(adv, want, rtol=1e-10, atol=1e-10)
        assert torch.equal(adv, ret)
        adv32, _ = compute("grpo", rewards.float(), mask, group=group, norm_adv_by_std_in_grpo=norm)
        torch.testing.assert_close(adv32.double(), want, rtol=2e-4, atol=2e-4)


def test_grpo_of_equal_scores_is_exactly_zero() -> None:
    scores = torch.tensor([0.1] * 7 + [1 / 3] * 5 + [-1e6] * 3)
    mask = torch.ones(15, 4)
    rewards = token_rewards.compute(scores, mask)
    group = torch.tensor([0] * 7 + [1] * 5 + [2] * 3)
    adv, _ = compute("grpo", rewards, mask, group=group)
    assert torch.equal(adv, torch.zeros(15, 4))


def test_grpo_keeps_the_raw_score_of_a_group_of_one() -> None:
    adv, _ = compute("grpo", torch.tensor([[0.0, 3.0]]), torch.ones(1, 2), group=torch.tensor([5]))
    torch.testing.assert_close(adv, torch.full((1, 2), 3.0))


def test_no_gradient_flows_into_advantages() -> None:
    values = torch.randn(2, 3, requires_grad=True)
    adv, ret = compute("gae", torch.ones(2, 3), torch.ones(2, 3), values=values)
    assert not adv.requires_grad and not ret.requires_grad


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "gea"}, "unknown advantage estimator 'gea'; did you mean 'gae'"),
        ({"response_mask": torch.ones(2, 4)}, r"token_rewards \[2, 3\], response_mask \[2, 4\]"),
        ({"values": torch.ones(2, 1)}, r"values \[2, 1\]"),
        ({"group": torch.zeros(3)}, r"group \[3\]"),
    ],
)
def test_advantages_refuse_what_does_not_fit(kwargs: dict[str, object], message: str) -> None:
    good = {"name": "grpo", "token_rewards": torch.ones(2, 3), "response_mask": torch.ones(2, 3)}
    good |= {"group": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(ValueError, match=message):
        advantages.compute(**(good | kwargs))  # type: ignore[arg-type]


def test_whitened_values_have_mean_0_and_variance_1() -> None:
    gen = torch.Generator().manual_seed(0)
    mask = random_mask(gen, 7, 50, holes=True)
    x = 1000 + 3 * torch.randn(7, 50, generator=gen, dtype=torch.float64)
    out = whiten(x, mask)
    torch.testing.assert_close(out, whiten_reference(x, mask))
    assert abs(float(out[mask].mean())) < 1e-6
    assert abs(float(out[mask].var()) - 1) < 1e-6
    assert torch.equal(whiten(torch.full((2, 2), 5.0), torch.ones(2, 2)), torch.zeros(2, 2))


def test_whitening_of_millions_of_tokens_stays_exact_in_float32() -> None:
    x = torch.randn(1000, 4000, generator=torch.Generator().manual_seed(1))
    out = whiten(x, torch.ones(1000, 4000, dtype=torch.bool)).double()
    assert float(out.var()) == pytest.approx(1, abs=2e-6)


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("length", [1, 127, 128, 1000])
def test_discounted_suffix_sum(decay: float, length: int) -> None:
    x = torch.randn(3, length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    want = torch.zeros_like(x)
    running = torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):
        running = x[:, t] + decay * running
        want[:, t] = running
    torch.testing.assert_close(discounted_suffix_sum(x, decay), want, rtol=1e-10, atol=1e-10)


def test_explained_variance() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    returns = torch.tensor([[0.0, 1.0, 2.0, 3.0, 99.0]])
    assert explained_variance(returns + 5, returns, mask) == 1
    assert explained_variance(torch.full((1, 5), 2.0), returns, mask) == 0
    assert explained_variance(-returns, returns, mask) == -3
    assert explained_variance(returns, torch.ones(1, 5), mask) == 0


def test_token_rewards_put_the_score_on_the_last_valid_token() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])
    scores = torch.tensor([1.0, 2.0, 3.0])
    assert token_rewards.compute(scores, mask).tolist() == [[0, 1, 0], [0, 0, 2], [3, 0, 0]]
    kl = torch.tensor([[1.0, 2.0, math.nan], [1.0, math.nan, 3.0], [9.0, 9.0, 9.0]])
    shaped = token_rewards.compute(scores, mask, kl=kl, kl_coef=0.5)
    assert shaped.tolist() == [[-0.5, 0, 0], [-0.5, 0, 0.5], [3, 0, 0]]
