"""How a step's samples, which rank 0 makes, are asked for and become every rank's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrl.core import Rollout
from mrl.trainers.shared.world import World

Sampled = tuple[Rollout, dict[str, float]]  # a step's samples, and metrics


@dataclass(frozen=True)
class Drawn:
    """A step's samples on rank 0, of which nothing is written down yet.

    rows: what RUN_DIR/rollouts will say of each; loads: the step's row of RUN_DIR/engines.jsonl
    """

    rollout: Rollout
    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    loads: dict[str, Any]


Work = Callable[[], Drawn]


def when_asked(work: Work) -> Work:
    """Nothing is begun before somebody waits for it."""
    return work


@dataclass(frozen=True)
class Sampler:
    """A step's samples for every rank. `start` returns at once on each; `Pending.result` is where they meet, and where
    what rank 0 does is watched (by the heartbeat and the section) and its errors become everybody's.

    make: rank 0's own work, the samples of a step. It may ask all ranks for `together`.
    write: rank 0's too, in the main thread once they are taken: writes them down
    together: as in `World.from_main`
    control: on every rank, once a step, of what its samples have become: `ScoreControl`
    begin: takes the work on rank 0 in `start`, and gives what waits for its result in `result`. By default the work is
        done there, in the main thread: an interrupt ends it, and `make` may do all that it likes. One that begins it in
        a thread lets the ranks compute meanwhile; until `result`, `make` must then not ask for `together`, enter a
        section or write to the recorder, as the ranks are elsewhere.
    """

    world: World
    make: Callable[[int], Drawn]
    write: Callable[[Drawn], Sampled]
    together: Callable[[Any], object]
    control: Callable[[Rollout], Sampled]
    begin: Callable[[Work], Work] = when_asked

    def start(self, step: int) -> Pending:
        """The samples of step `step` (from 0), drawn with the weights that the engines have. Not collective."""

        def work() -> Drawn:
            return self.make(step)

        return Pending(self, self.begin(work) if self.world.is_main else work)


class Pending:
    """Samples that have been asked for. wait: rank 0's, their making or what waits for it."""

    def __init__(self, sampler: Sampler, wait: Work) -> None:
        self._sampler, self._wait = sampler, wait
        self._found: Sampled | None = None

    def result(self) -> Sampled:
        """The step's samples with their controlled scores, and metrics, the same on every rank. Collective the first
        time; raises RankZeroError on every rank if rank 0's work failed."""
        if self._found is None:
            sampler = self._sampler
            taken = sampler.world.from_main("rollout", lambda: sampler.write(self._wait()), sampler.together)
            rollout, metrics = taken
            rollout, controlled = sampler.control(rollout)
            self._found = rollout, metrics | controlled
        return self._found
