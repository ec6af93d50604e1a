"""Keys that the configuration refuses for want of an effect have none in the functions that they are for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mrl.algo import advantages
from mrl.options.estimators import ESTIMATORS, EstimatorOptions

LENS = (3, 5, 2, 4)
GROUP = torch.tensor([0, 0, 1, 1])
MASK = torch.arange(max(LENS))[None] < torch.tensor(LENS)[:, None]


def advantage_of(name: str, scores: Tensor) -> Tensor:
    rewards = torch.zeros(MASK.shape, dtype=torch.float64)
    rewards[torch.arange(len(LENS)), torch.tensor(LENS) - 1] = scores.double()
    greedy = scores[:2].repeat_interleave(2).double()
    found, _ = advantages.compute(name, token_rewards=rewards, response_mask=MASK, group=GROUP, greedy_scores=greedy)
    return found


def options_of(name: str) -> EstimatorOptions:
    return ESTIMATORS[name].model_construct()


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if options_of(name).is_shift_free])
def test_a_mean_of_all_scores_cancels(name: str) -> None:
    scores = torch.tensor([0.0, 1.0, 0.5, -2.0])
    torch.testing.assert_close(advantage_of(name, scores + 3), advantage_of(name, scores))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if options_of(name).is_scale_free])
def test_a_scale_of_all_scores_cancels(name: str) -> None:
    scores = torch.tensor([0.0, 1.0, 0.5, -2.0])
    torch.testing.assert_close(advantage_of(name, 4 * scores), advantage_of(name, scores), rtol=1e-5, atol=1e-5)
