"""A step's samples are asked for, and taken: what happens when, and on which rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mrl.core import Rollout
from mrl.trainers.rl.sampler import Drawn, Sampled, Sampler
from tests.helpers.world import run_world


class OneRank:
    """What `Sampler` needs of the world, alone."""

    is_main = True

    def from_main(self, what: str, make: Callable[[], Any], together: Callable[[Any], object]) -> Any:
        assert what == "rollout"
        return make()


def written(drawn: Drawn) -> Sampled:
    return drawn.rollout, drawn.metrics


def make_sampler(made: list[int]) -> Sampler:
    def make(step: int) -> Drawn:
        if step == 7:
            raise KeyboardInterrupt
        made.append(step)
        return Drawn(Rollout.of(step, [[1]], [[2, 3]]), {"reward/mean": 0.5}, [], {})

    def control(rollout: Rollout) -> Sampled:
        return rollout, {"score/mean": float(len(made))}

    return Sampler(OneRank(), make, written, print, control)  # type: ignore[arg-type]


def test_samples_are_made_when_they_are_taken_once() -> None:
    made: list[int] = []
    pending = make_sampler(made).start(3)
    assert made == []
    rollout, metrics = pending.result()
    assert made == [3] and rollout.step == 3 and metrics == {"reward/mean": 0.5, "score/mean": 1.0}
    assert pending.result()[0] is rollout and made == [3], "the same samples were made, or their scores counted, twice"


def test_an_interrupt_ends_the_making_of_samples() -> None:
    with pytest.raises(KeyboardInterrupt):
        make_sampler([]).start(7).result()


def test_ranks_may_compute_together_while_rank_0_samples() -> None:
    said = run_world(2, "sampler.py", timeout_s=120)
    assert "rank 0 is through" in said and "rank 1 is through" in said
