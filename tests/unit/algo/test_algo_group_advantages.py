"""Group estimators against references in float64, written response by response from the formulas."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mrl.algo import advantages
from tests.unit.algo.test_algo_advantages import random_mask, whiten_reference

NAMES = ["grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg"]


def rloo(scores: list[float], lens: list[int], i: int) -> float:
    others = scores[:i] + scores[i + 1 :]
    return scores[i] - sum(others) / len(others) if others else 0.0


def opo(scores: list[float], lens: list[int], i: int) -> float:
    if len(scores) == 1:
        return scores[0]
    return scores[i] - sum(n * s for n, s in zip(lens, scores, strict=True)) / max(1, sum(lens))


def centred(scores: list[float], lens: list[int], i: int) -> float:
    return scores[i] - (sum(scores) / len(scores) if len(scores) > 1 else 0.0)


def passk(scores: list[float], lens: list[int], i: int) -> float:
    best, second = sorted(scores, reverse=True)[:2]
    lead = best - second if scores.index(best) == i else 0.0
    return lead / (statistics.stdev(scores) + 1e-6)


ONE_RESPONSE: dict[str, Callable[[list[float], list[int], int], float]] = {
    "rloo": rloo,
    "opo": opo,
    "reinforce_plus_plus_baseline": centred,
    "gpg": centred,
    "grpo_passk": passk,
}


def reference(name: str, rewards: Tensor, mask: Tensor, group: Tensor) -> Tensor:
    scores, lens = [float(row.sum()) for row in rewards], mask.sum(1).tolist()
    out = torch.zeros_like(rewards)
    for i, number in enumerate(group.tolist()):
        members = [j for j, other in enumerate(group.tolist()) if other == number]
        value = ONE_RESPONSE[name]([scores[j] for j in members], [lens[j] for j in members], members.index(i))
        out[i][mask[i]] = value
    if name == "gpg":
        out *= len(scores) / max(1, sum(score != 0 for score in scores))
    return whiten_reference(out, mask) if name == "reinforce_plus_plus_baseline" else out


@pytest.mark.parametrize("name", sorted(ONE_RESPONSE))
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(4, 1), (9, 5), (40, 33)])
def test_group_estimators(name: str, rows: int, length: int, holes: bool) -> None:
    gen = torch.Generator().manual_seed(rows + length)
    mask = random_mask(gen, rows, length, holes)
    mask[1] = True
    group = torch.randint(-3, 5, (rows,), generator=gen) * 1000
    if name == "grpo_passk":
        group = torch.arange(rows).remainder(max(1, rows // 2))[torch.randperm(rows, generator=gen)]
    else:
        group[1] = 77  # a group of one sample
    rewards = torch.randn(rows, length, generator=gen, dtype=torch.float64)
    rewards[2] = 0
    want = reference(name, rewards, mask, group)
    adv, returns = advantages.compute(name, token_rewards=rewards, response_mask=mask, group=group)
    torch.testing.assert_close(adv, want, rtol=1e-9, atol=1e-9)
    assert torch.equal(adv, returns)
    narrow, _ = advantages.compute(name, token_rewards=rewards.float(), response_mask=mask, group=group)
    torch.testing.assert_close(narrow.double(), want, rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("name", NAMES)
def test_equal_scores_give_exactly_zero(name: str) -> None:
    rewards = torch.zeros(9, 4)
    rewards[:, 3] = torch.tensor([0.1] * 4 + [1 / 3] * 5)
    group = torch.tensor([0] * 4 + [1] * 5)
    adv, _ = advantages.compute(name, token_rewards=rewards, response_mask=torch.ones(9, 4), group=group)
    assert torch.equal(adv, torch.zeros(9, 4))


@pytest.mark.parametrize("name", NAMES)
def test_order_and_padding_do_not_matter(name: str) -> None:
    gen = torch.Generator().manual_seed(8)
    mask = random_mask(gen, 12, 10, holes=True)
    rewards = torch.randn(12, 10, generator=gen, dtype=torch.float64)
    group = torch.arange(12) // 4
    order = torch.randperm(12, generator=gen)
    adv, _ = advantages.compute(name, token_rewards=rewards, response_mask=mask, group=group)
    moved, _ = advantages.compute(
        name,
        token_rewards=torch.nn.functional.pad(rewards[order], (0, 7)),
        response_mask=torch.nn.functional.pad(mask[order], (0, 7)),
        group=group[order],
    )
    torch.testing.assert_close(moved[:, :10], adv[order])


def test_passk_of_a_single_response_is_refused() -> None:
    with pytest.raises(ValueError, match="'grpo_passk' needs at least 2 responses"):
        advantages.compute(
            "grpo_passk", token_rewards=torch.ones(3, 2), response_mask=torch.ones(3, 2), group=torch.tensor([0, 0, 1])
        )


def test_passk_without_the_division() -> None:
    adv, _ = advantages.compute(
        "grpo_passk",
        token_rewards=torch.tensor([[1.0], [5.0], [3.5]]),
        response_mask=torch.ones(3, 1),
        group=torch.zeros(3, dtype=torch.int64),
        norm_adv_by_std_in_grpo=False,
    )
    assert adv.flatten().tolist() == [0, 1.5, 0]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_plus_plus(gamma: float) -> None:
    gen = torch.Generator().manual_seed(2)
    mask = random_mask(gen, 6, 150, holes=True)
    rewards = torch.randn(6, 150, generator=gen, dtype=torch.float64)
    want = torch.zeros_like(rewards)
    for i in range(6):
        running = 0.0
        for t in reversed(range(150)):
            if mask[i, t]:
                running = float(rewards[i, t]) + gamma * running
                want[i, t] = running
    adv, returns = advantages.compute(
        "reinforce_plus_plus", token_rewards=rewards, response_mask=mask, group=torch.arange(6), gamma=gamma
    )
    torch.testing.assert_close(returns, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(adv, whiten_reference(want, mask), rtol=1e-9, atol=1e-9)
