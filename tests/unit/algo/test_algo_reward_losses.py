"""Values and gradients of reward model losses against their papers' formulas in float64, one unit at a time. They stay
finite however far scores are apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algo.registry import arguments
from mrl.algo.reward_losses import REWARD_LOSSES, LabelledScores, ScoreLists, ScorePairs
from mrl.options import reward_losses as options

LISTS = ((1, 2), (2, 1, 3), (1, 1, 2), (3, 1, 2, 2), (1, 1))  # ranks; some of them are tied
Scores = list[float]


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def pair(better: float, worse: float, margin: float, c: float, e: float) -> float:
    lead = better - worse - margin
    return -(1 - e) * math.log(sigma(lead)) - e * math.log(sigma(-lead)) + c * (better + worse) ** 2


def plackett_luce(scores: Scores, ranks: tuple[int, ...], c: float) -> float:
    total = 0.0
    for score, rank in zip(scores, ranks, strict=True):
        if rank < max(ranks):
            left = [other for other, r in zip(scores, ranks, strict=True) if r >= rank]
            total -= math.log(math.exp(score) / sum(map(math.exp, left)))
    return total + c * (2 * sum(scores) / len(scores)) ** 2


def pairwise(scores: Scores, ranks: tuple[int, ...], c: float, e: float) -> float:
    of = [
        pair(scores[i], scores[j], 0.0, c, e)
        for i, j in itertools.permutations(range(len(scores)), 2)
        if ranks[i] < ranks[j]
    ]
    return sum(of) / len(of) if of else 0.0


def table(scores: Tensor) -> ScoreLists:
    """Returns the lists of scores [..., sum of the lists' lengths], which are concatenated."""
    most = max(map(len, LISTS))
    present = torch.tensor([[i < len(ranks) for i in range(most)] for ranks in LISTS])
    place = torch.zeros(present.shape, dtype=torch.int64).masked_scatter_(present, torch.arange(scores.size(-1)))
    ranks = torch.tensor([[*ranks, *(most - len(ranks)) * (1,)] for ranks in LISTS]).double()
    return ScoreLists(scores[..., place], ranks, present)


def computed(name: str, of: Any, **keys: float) -> Tensor:
    loss = REWARD_LOSSES.get(name)
    return loss(of, **arguments(loss, options.REWARD_LOSSES[name].filled(keys)))


def gradient(values: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    scores = scores.clone().requires_grad_()
    [found] = torch.autograd.grad(values(scores).sum(), scores)
    return found


def slopes(value: Callable[[Scores], float], at: Scores) -> Scores:
    step, found = 1e-6, []
    for i in range(len(at)):
        up, down = ([x + sign * step * (i == j) for j, x in enumerate(at)] for sign in (1, -1))
        found.append((value(up) - value(down)) / (2 * step))
    return found


def draw(count: int, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(3, count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


@pytest.mark.parametrize(("c", "e"), [(0.0, 0.0), (0.3, 0.1)])
def test_pairs_with_margins_centring_and_smoothing(c: float, e: float) -> None:
    scores, margin = draw(10), torch.tensor([0.0, 0.5, 1.0, 3.0, -0.5]).double()
    keys = {"center_rewards_coefficient": c, "label_smoothing": e}
    of = lambda s: computed("bradley_terry", ScorePairs(s[:, 0::2], s[:, 1::2], margin), **keys)  # noqa: E731
    found, slope = of(scores), gradient(of, scores)
    for head, i in itertools.product(range(3), range(5)):
        paper = lambda s, i=i: pair(s[0], s[1], float(margin[i]), c, e)  # noqa: E731
        at = scores[head, 2 * i : 2 * i + 2].tolist()
        assert float(found[head, i]) == pytest.approx(paper(at), rel=1e-9)
        assert slope[head, 2 * i : 2 * i + 2].tolist() == pytest.approx(slopes(paper, at), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", ["plackett_luce", "pairwise"])
def test_lists_of_several_lengths_and_with_ties(name: str) -> None:
    scores, keys = draw(sum(map(len, LISTS))), {"center_rewards_coefficient": 0.2}
    keys |= {"label_smoothing": 0.1} if name == "pairwise" else {}
    of = lambda s: computed(name, table(s), **keys)  # noqa: E731
    found, slope = of(scores), gradient(of, scores)
    for head in range(3):
        first = 0
        for i, ranks in enumerate(LISTS):
            at = scores[head, first : first + len(ranks)].tolist()
            paper = lambda s, r=ranks: (  # noqa: E731
                plackett_luce(s, r, 0.2) if name == "plackett_luce" else pairwise(s, r, 0.2, 0.1)
            )
            assert float(found[head, i]) == pytest.approx(paper(at), rel=1e-9, abs=1e-12)
            there = slope[head, first : first + len(ranks)].tolist()
            assert there == pytest.approx(slopes(paper, at), rel=1e-5, abs=1e-7)
            first += len(ranks)


def test_a_list_of_two_is_a_pair() -> None:
    scores, keys = draw(2), {"center_rewards_coefficient": 0.2}
    a, b = scores[:, :1], scores[:, 1:]
    lists = ScoreLists(scores[:, None], torch.tensor([[1.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool))
    want = computed("bradley_terry", ScorePairs(a, b, torch.zeros(1).double()), **keys)
    for name in ("plackett_luce", "pairwise"):
        torch.testing.assert_close(computed(name, lists, **keys), want)


def test_scores_and_steps() -> None:
    scores, targets = draw(4), torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    squared, entropy = (computed(name, LabelledScores(scores, targets)) for name in ("regression", "process"))
    for head, i in itertools.product(range(3), range(4)):
        score, target = float(scores[head, i]), float(targets[i])
        assert float(squared[head, i]) == pytest.approx((score - target) ** 2)
        p = sigma(score)
        assert float(entropy[head, i]) == pytest.approx(-target * math.log(p) - (1 - target) * math.log(1 - p))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_finite_wherever_the_scores_are(dtype: torch.dtype) -> None:
    far = torch.tensor([-200.0, -89.0, 0.0, 89.0, 200.0], dtype=dtype)
    pairs = torch.cartesian_prod(far, far).T
    lists = torch.cat([far, far, far])[None, : sum(map(len, LISTS))]
    for of in (
        lambda s: computed("bradley_terry", ScorePairs(s[:1], s[1:], torch.zeros(25, dtype=dtype))),
        lambda s: computed("process", LabelledScores(s[:1], (torch.arange(25) % 2).to(dtype))),
        lambda s: computed("plackett_luce", table(lists + 0 * s.sum())),
        lambda s: computed("pairwise", table(lists + 0 * s.sum())),
    ):
        assert of(pairs).isfinite().all() and gradient(of, pairs).isfinite().all()
