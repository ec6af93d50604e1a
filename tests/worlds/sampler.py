"""Run by tests.world: what ranks do between asking for a step's samples and taking them. Usage: sampler.py

Rank 0 makes its samples in a thread; between `start` and `result` all ranks compute something together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from mrl import platform

platform.install()

from mrl.core import Rollout  # noqa: E402
from mrl.parallel import rank  # noqa: E402
from mrl.trainers.rl.generate import Sampled, Sampler, when_asked  # noqa: E402
from mrl.trainers.shared.world import RankZeroError, World  # noqa: E402

WAIT_S = 60.0


def uncontrolled(rollout: Rollout) -> Sampled:
    return rollout, {}


def a_step(world: World, begin: Callable[[Callable[[], Sampled]], Callable[[], Sampled]], number: int) -> bool:
    """Whether rank 0's work had begun before its result was asked for. That work ends only after the ranks' own."""
    begun, computed = threading.Event(), threading.Event()

    def make(step: int) -> Sampled:
        assert world.is_main
        begun.set()
        assert computed.wait(WAIT_S)
        if step < 0:
            raise ValueError(f"no step {step}")
        asked = world.together(20) if begin is when_asked else 41.0  # a thread must not before `result`
        return Rollout.of(step, [[1]], [[2, 3]]), {"asked": asked}

    def together(number: int) -> float:
        total = torch.tensor(float(number + rank()))
        dist.all_reduce(total)
        return float(total)

    pending = Sampler(world, make, together, uncontrolled, begin).start(number)
    early = begun.wait(WAIT_S if begin is not when_asked else 0.0) if world.is_main else False
    total = torch.tensor(rank() + 1.0)
    dist.all_reduce(total)
    assert total == 3.0
    computed.set()
    rollout, metrics = pending.result()
    assert (rollout.step, rollout.tokens.tolist(), metrics) == (number, [1, 2, 3], {"asked": 41.0})
    assert pending.result()[0] is rollout
    return early


def main() -> None:
    world = World(30.0, 60.0, seed=1)
    with ThreadPoolExecutor(1) as threads:

        def in_a_thread(work: Callable[[], Sampled]) -> Callable[[], Sampled]:
            return threads.submit(work).result

        for number, (begin, is_early) in enumerate([(when_asked, False), (in_a_thread, True)] * 2):
            assert a_step(world, begin, number) == (is_early and world.is_main)
        for begin in (when_asked, in_a_thread):
            try:
                a_step(world, begin, -1)
                raise AssertionError("it did not fail")
            except RankZeroError as error:
                assert "rollout failed: ValueError: no step -1" in str(error), error
    print(f"rank {rank()} is through", flush=True)
    world.close()


if __name__ == "__main__":
    main()
