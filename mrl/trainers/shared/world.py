"""Process group, control group and seeds of every trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mrl import failure, platform
from mrl.parallel import CollectiveErrorCheck, Meshes, gather, rank
from mrl.parallel.error_check import by_reason
from mrl.trainers.shared.heartbeat import Activity, Heartbeat

T = TypeVar("T")


class RankZeroError(RuntimeError):
    """Work of rank 0 alone (the engine, rewards, files) failed; raised on every rank with rank 0's message."""


class OtherRankError(RuntimeError):
    """Another rank failed in work that rank 0 requested from all; raised on rank 0."""


class _RankZero(CollectiveErrorCheck[str]):
    """Error check of rank 0's work; other ranks receive the result on the heartbeat channel."""

    def report(self, error: BaseException) -> str:
        return failure.describe(error)

    def combined_error(self, what: str, reports: Mapping[int, str]) -> RankZeroError:
        return RankZeroError(f"{what} failed: {reports[0]}")


@dataclass(frozen=True)
class _CollectiveCall:
    argument: object


class World:
    """The torchrun world.

    timeout_s: maximum interval between heartbeats, in seconds; wait_s: maximum seconds that rank 0 may work alone
    without progress (`activity`)
    """

    def __init__(self, timeout_s: float, wait_s: float, seed: int) -> None:
        platform.init_process_group(timeout_s)
        torch.manual_seed(seed)
        self.is_main = rank() == 0
        self.meshes = Meshes(timeout_s, seed)
        self._together: Callable[[Any], object] | None = None
        self.activity = Activity(wait_s)
        self._heartbeat = Heartbeat(timeout_s, self.activity)
        self._control = self._heartbeat.group
        self._rank_zero = _RankZero()

    def from_main(self, what: str, make: Callable[[], T], together: Callable[[Any], object] | None = None) -> T:
        """Runs `make` on rank 0 and returns its result on every rank. Raises on every rank if `make` fails.

        While `make` runs, rank 0 may call `self.together(argument)`. Then `together(argument)`, which may be
        collective, runs on every rank, and rank 0 receives its own result. If it fails on rank 0, `make` handles the
        error; if it fails only on other ranks, rank 0 raises OtherRankError.
        """
        self._together = together
        if not self.is_main:
            return self._follow(what)
        value, problem, cause = None, None, None
        try:
            with self._heartbeat.sent_while_working(what):
                value, problem, cause = self._rank_zero.run(make)
            self._heartbeat.send((value, problem))
        except Exception:
            if problem is None or cause is None or failure.is_lost_contact(cause):
                raise
            raise self._rank_zero.combined_error(what, {0: problem}) from cause  # other ranks are out of reach
        return self._rank_zero.raise_if_failed(what, [(value, problem)], cause)[0]

    def together(self, argument: object) -> Any:
        """Runs the `together` of `from_main` on all ranks. Called by rank 0 inside `from_main`."""
        assert self.is_main and self._together is not None
        with self._heartbeat.lock:
            self._heartbeat.send(_CollectiveCall(argument))
            found, problem, reports = self._run_together(argument)
            self.activity.note()
            if problem is not None:
                raise problem
            if reports:
                raise OtherRankError(by_reason(reports))
            return found

    def _run_together(self, argument: object) -> tuple[Any, Exception | None, dict[int, str]]:
        """Returns this rank's result or error, and all ranks' error reports by rank. Collective."""
        found, problem = None, None
        try:
            assert self._together is not None
            found = self._together(argument)
        except Exception as error:
            problem = error
        try:
            reports = gather(None if problem is None else failure.describe(problem), self._control)
        except RuntimeError:
            if problem is not None:  # may be the reason why the other ranks are gone
                raise problem from problem.__cause__
            raise
        return found, problem, {number: report for number, report in enumerate(reports) if report is not None}

    def _follow(self, what: str) -> Any:
        problem, mine = None, None
        while isinstance(message := self._heartbeat.receive(), _CollectiveCall):
            _, problem, reports = self._run_together(message.argument)
            mine = mine if problem is None or 0 in reports else problem  # otherwise rank 0 handles its own error
        (value,) = self._rank_zero.raise_if_failed(what, [message], mine or problem)
        if mine is not None:
            raise mine
        return value

    def any(self, value: bool) -> bool:
        """True if `value` is true on any rank. Collective."""
        box = torch.tensor([value], dtype=torch.int32)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self._control)
        return bool(box)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Gathers the same number of values from every rank, on every rank. Collective."""
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine, group=self._control)
        return [row.tolist() for row in rows]

    def close(self) -> None:
        dist.destroy_process_group()
