"""Run by tests.helpers.world: what ranks do between asking for a step's samples and taking them. Usage: sampler.py

Rank 0 makes its samples in a thread; between `start` and `result` all ranks compute something together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from mrl import platform

platform.install()

from mrl.core import Rollout  # noqa: E402
from mrl.parallel import rank  # noqa: E402
from mrl.trainers.rl.ahead import Ahead  # noqa: E402
from mrl.trainers.rl.sampler import Drawn, Sampled, Sampler, Work, when_asked  # noqa: E402
from mrl.trainers.shared.heartbeat import Activity  # noqa: E402
from mrl.trainers.shared.world import OtherRankError, RankZeroError, World  # noqa: E402

WAIT_S = 60.0


def written(drawn: Drawn) -> Sampled:
    return drawn.rollout, drawn.metrics


def uncontrolled(rollout: Rollout) -> Sampled:
    return rollout, {}


def a_step(world: World, begin: Callable[[Work], Work], number: int) -> bool:
    """Whether rank 0's work had begun before its result was asked for. That work ends only after the ranks' own."""
    begun, computed = threading.Event(), threading.Event()

    def make(step: int) -> Drawn:
        assert world.is_main
        begun.set()
        assert computed.wait(WAIT_S)
        if step < 0:
            raise ValueError(f"no step {step}")
        asked = world.together(20) if begin is when_asked else 41.0  # a thread must not before `result`
        return Drawn(Rollout.of(step, [[1]], [[2, 3]]), {"asked": asked}, [], {})

    def together(number: int) -> float:
        total = torch.tensor(float(number + rank()))
        dist.all_reduce(total)
        return float(total)

    pending = Sampler(world, make, written, together, uncontrolled, begin).start(number)
    early = begun.wait(WAIT_S if begin is not when_asked else 0.0) if world.is_main else False
    total = torch.tensor(rank() + 1.0)
    dist.all_reduce(total)
    assert total == 3.0
    computed.set()
    rollout, metrics = pending.result()
    assert (rollout.step, rollout.tokens.tolist(), metrics["asked"]) == (number, [1, 2, 3], 41.0)
    assert metrics.keys() - {"asked"} == (set() if begin is when_asked else {"perf/generate_s"})
    assert pending.result()[0] is rollout
    return early


def fails(failing: set[int], world: World) -> str:
    """What all ranks raise where some of them fail in the first of two things that rank 0 asks of all."""

    def together(number: int) -> None:
        if number == 0 and rank() in failing:
            raise KeyError(f"rank {rank()} has no such thing")

    def make() -> str:
        try:
            world.together(0)
        except KeyError:
            assert world.is_main
        world.together(1)
        return "gone on"

    try:
        return world.from_main("asking", make, together)
    except RankZeroError as error:
        assert world.is_main is isinstance(error.__cause__, OtherRankError) and world.is_main is not isinstance(
            error.__cause__, KeyError
        )
        return str(error)


def main() -> None:
    world = World(30.0, 60.0, seed=1)
    assert fails({1}, world).startswith("asking failed: rank 1: KeyError: 'rank 1 has no such thing'")
    assert fails({0, 1}, world) == fails(set(), world) == "gone on", "rank 0 knows what to do about its own"
    ahead = Ahead(print, world.together, lambda: None, Activity(60.0))
    for number, (begin, is_early) in enumerate([(when_asked, False), (ahead.begin, True)] * 2):
        assert a_step(world, begin, number) == (is_early and world.is_main)
    for begin in (when_asked, ahead.begin):
        try:
            a_step(world, begin, -1)
            raise AssertionError("it did not fail")
        except RankZeroError as error:
            assert "rollout failed: ValueError: no step -1" in str(error), error
    print(f"rank {rank()} is through", flush=True)
    world.close()


if __name__ == "__main__":
    main()
