"""One outcome on every rank: what fails on one rank raises the same error on all of them, and none waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch.distributed as dist

from mrl.parallel.mesh import rank, world_size

T = TypeVar("T")
R = TypeVar("R")


class Agreement(Generic[R]):
    """Steps that all ranks take together. Each is collective over `group`, which holds all ranks (the default one where
    it is None), and raises the same error on every rank if any rank's action raised one of `caught`.

    A room has its own words: what a rank reports of its error, what all ranks raise then, and what a rank raises that
    waits in vain for another one.
    """

    caught: ClassVar[tuple[type[BaseException], ...]] = (Exception,)

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def report(self, error: BaseException) -> R:
        """What all ranks hear of an error here (picklable)."""
        raise NotImplementedError

    def verdict(self, what: str, reports: Mapping[int, R]) -> Exception:
        """What every rank raises; `reports` by rank, of those that failed."""
        raise NotImplementedError

    def lost(self, what: str, error: RuntimeError, cause: BaseException | None) -> None:
        """Raises the room's error, or leaves it at torch's own; `cause`: what failed here."""

    def each(self, what: str, action: Callable[[], T]) -> list[T]:
        """Every rank's result of `action` (small, picklable), by rank, on every rank."""
        return self.settle(what, *self.run(action))

    def together(self, what: str, action: Callable[[], T]) -> T:
        """This rank's own result of `action`, which may be anything.

        An action that is itself collective must not fail on one rank between its collectives, or the others wait for
        the process group's time-out.
        """
        mine: list[T] = []
        self.each(what, lambda: mine.append(action()))
        return mine[0]

    def on_main(self, what: str, action: Callable[[], T]) -> T:
        """Rank 0's result of `action` (small, picklable), which only rank 0 runs, on every rank."""
        results: list[Any] = self.each(what, action if rank() == 0 else lambda: None)
        return results[0]

    def collect(self, what: str, value: T, owner: int = 0) -> list[T]:
        """Every rank's value, by rank, on `owner`; nothing on the others."""
        values: list[Any] | None = [value] * world_size() if rank() == owner else None
        if world_size() > 1:
            with self._contact(what, None):
                dist.gather_object(value, values, dst=owner, group=self.group)
        return values or []

    def run(self, action: Callable[[], T]) -> tuple[T | None, R | None, BaseException | None]:
        """The action's result, or the report of its error and the error itself. Needs no other rank, as `judge`."""
        try:
            return action(), None, None
        except self.caught as error:
            return None, self.report(error), error

    def settle(self, what: str, value: T | None, report: R | None, cause: BaseException | None = None) -> list[T]:
        """Every rank's value, unless a rank has a report."""
        with self._contact(what, cause):
            answers = gather((value, report), self.group)
        return self.judge(what, answers, cause)

    def judge(self, what: str, answers: Sequence[tuple[Any, R | None]], cause: BaseException | None) -> list[Any]:
        """The values of ranks 0, 1, ...; raises the verdict if there is a report."""
        reports = {number: report for number, (_, report) in enumerate(answers) if report is not None}
        if reports:
            raise self.verdict(what, reports) from cause
        return [value for value, _ in answers]

    @contextlib.contextmanager
    def _contact(self, what: str, cause: BaseException | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.lost(what, error, cause)
            raise


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, by rank, on every rank. Collective over `group`, which holds all ranks."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def by_reason(reasons: Mapping[int, str]) -> str:
    """Reasons by rank in one line, with the ranks that give the same one put together; in a world of one just that."""
    if world_size() == 1:
        return reasons[0]
    ranks: dict[str, list[str]] = {}
    for number, reason in sorted(reasons.items()):
        ranks.setdefault(reason, []).append(str(number))
    return "; ".join(f"rank {', '.join(who)}: {reason}" for reason, who in ranks.items())
