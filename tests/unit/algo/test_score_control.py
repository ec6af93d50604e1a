"""Score controls as in TRL, against statistics of all scores so far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algo.running_moments import RunningMoments
from mrl.config.schema import AlgorithmConfig
from mrl.core import Rollout
from mrl.trainers.rl.scores import ScoreControl

EPS = 2.0**-23  # epsilon of float32


def rollout(scores: list[float], greedy: list[float] | None = None) -> Rollout:
    n = len(scores)
    ones = torch.ones(n, dtype=torch.int64)
    return Rollout(
        0, ones, ones, 0 * ones, ones, torch.tensor(scores), torch.zeros(n),
        greedy_scores=None if greedy is None else torch.tensor(greedy),
    )  # fmt: skip


def control(**cfg: Any) -> ScoreControl:
    return ScoreControl(AlgorithmConfig(adv_estimator="gae", **cfg))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=7), min_size=1, max_size=6))
def test_moments_of_any_batches_are_those_of_all_values(batches: list[list[float]]) -> None:
    moments, seen = RunningMoments(), torch.tensor([x for batch in batches for x in batch], dtype=torch.float64)
    for batch in batches:
        moments.update(torch.tensor(batch, dtype=torch.float64))
    assert moments.count == len(seen)
    if len(seen) > 1:
        assert moments.mean == pytest.approx(float(seen.mean()), abs=1e-9)
        assert moments.std == pytest.approx(float(seen.std()), abs=1e-6)
    else:
        assert moments.std == 1.0


def test_values_that_are_not_finite_are_left_out() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, float("nan"), 3.0, float("inf")]))
    assert (moments.count, moments.mean) == (2, 2.0)


@pytest.mark.parametrize("norm", [False, True])
def test_scores_are_scaled_by_the_statistics_of_the_run_so_far(norm: bool) -> None:
    scale = control(use_score_scaling=True, use_score_norm=norm)
    seen: list[float] = []
    for scores in ([1.0, 2.0, 4.0], [7.0, -3.0], [0.5, 0.5]):
        seen += scores
        all_so_far = torch.tensor(seen, dtype=torch.float64)
        mean, std = (float(all_so_far.mean()) if norm else 0.0), float(all_so_far.std()) + EPS
        got, metrics = scale(rollout(scores))
        torch.testing.assert_close(
            got.scores.double(), (torch.tensor(scores).double() - mean) / std, rtol=1e-6, atol=1e-6
        )
        assert metrics["score/running_std"] == pytest.approx(float(all_so_far.std()))
        assert metrics["score/mean"] == pytest.approx(float(got.scores.mean()))


def test_clipping_comes_last() -> None:
    got, metrics = control(use_score_scaling=True, use_score_norm=True, score_clip=0.5)(rollout([0.0, 1.0, 2.0, 1.0]))
    assert got.scores.tolist() == [-0.5, 0.0, 0.5, 0.0]
    assert metrics["score/clipped"] == 0.5
    only_clipped, metrics = control(score_clip=1.5)(rollout([-4.0, 1.0]))
    assert only_clipped.scores.tolist() == [-1.5, 1.0]
    assert "score/running_std" not in metrics


def test_the_greedy_baseline_is_scaled_with_the_scores_it_is_taken_from() -> None:
    scale = control(use_score_scaling=True, use_score_norm=True)
    got, _ = scale(rollout([0.0, 4.0], greedy=[4.0, 0.0]))
    assert got.greedy_scores is not None and torch.equal(got.greedy_scores, got.scores.flip(0))
    assert scale.moments.count == 2, "baselines are no scores"


def test_nothing_is_touched_where_nothing_is_switched_on() -> None:
    before = rollout([1.0, 5.0])
    assert control()(before) == (before, {})


def test_the_statistics_go_on_from_a_checkpoint() -> None:
    whole, first, second = (control(use_score_scaling=True, use_score_norm=True) for _ in range(3))
    for each in (whole, first):
        each(rollout([1.0, 2.5, 9.0]))
    second.moments.load_state_dict(first.moments.state_dict())
    assert torch.equal(second(rollout([3.0]))[0].scores, whole(rollout([3.0]))[0].scores)
