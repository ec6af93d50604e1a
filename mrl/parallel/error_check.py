"""Collective error check: an error on one rank raises the same error on all ranks, so none waits for a failed one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch.distributed as dist

from mrl.parallel.mesh import rank, world_size

T = TypeVar("T")
R = TypeVar("R")


class CollectiveErrorCheck(Generic[R]):
    """Steps that all ranks take together, each followed by a collective error check.

    Each step is collective over `group`, which holds all ranks (None: the default group). It raises the same error on
    every rank if any rank's action raised one of `caught`. Subclasses define the report of a rank's error, the error
    that all ranks raise, and the error of a rank whose peer does not answer.
    """

    caught: ClassVar[tuple[type[BaseException], ...]] = (Exception,)

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def report(self, error: BaseException) -> R:
        """Returns the picklable description of this rank's error that all ranks receive."""
        raise NotImplementedError

    def combined_error(self, what: str, reports: Mapping[int, R]) -> Exception:
        """Returns the error that every rank raises; `reports` of the failed ranks, by rank."""
        raise NotImplementedError

    def peer_lost(self, what: str, error: RuntimeError, cause: BaseException | None) -> None:
        """Raises the subclass's error for a rank that does not answer, or returns to leave torch's own; `cause`: the
        error of this rank.
        """

    def each(self, what: str, action: Callable[[], T]) -> list[T]:
        """Returns every rank's result of `action` (small, picklable), by rank, on every rank."""
        return self.exchange(what, *self.run(action))

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Returns this rank's own result of `action`, which may be anything.

        An action that is itself collective must not fail on one rank between its collectives: the other ranks would
        wait for the process group's time-out.
        """
        mine: list[T] = []
        self.each(what, lambda: mine.append(action()))
        return mine[0]

    def on_main(self, what: str, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0 only; returns its result (small, picklable) on every rank."""
        results: list[Any] = self.each(what, action if rank() == 0 else lambda: None)
        return results[0]

    def collect(self, what: str, value: T, owner: int = 0) -> list[T]:
        """Returns every rank's value, by rank, on `owner`; an empty list on the others."""
        values: list[Any] | None = [value] * world_size() if rank() == owner else None
        if world_size() > 1:
            with self._contact(what, None):
                dist.gather_object(value, values, dst=owner, group=self.group)
        return values or []

    def run(self, action: Callable[[], T]) -> tuple[T | None, R | None, BaseException | None]:
        """Returns the action's result, or the report of its error and the error itself. Local, like
        `raise_if_failed`.
        """
        try:
            return action(), None, None
        except self.caught as error:
            return None, self.report(error), error

    def exchange(self, what: str, value: T | None, report: R | None, cause: BaseException | None = None) -> list[T]:
        """Returns every rank's value. Raises the combined error if any rank has a report."""
        with self._contact(what, cause):
            answers = gather((value, report), self.group)
        return self.raise_if_failed(what, answers, cause)

    def raise_if_failed(
        self, what: str, answers: Sequence[tuple[Any, R | None]], cause: BaseException | None
    ) -> list[Any]:
        """Returns the values of ranks 0, 1, ...; raises the combined error if there is a report."""
        reports = {number: report for number, (_, report) in enumerate(answers) if report is not None}
        if reports:
            raise self.combined_error(what, reports) from cause
        return [value for value, _ in answers]

    @contextlib.contextmanager
    def _contact(self, what: str, cause: BaseException | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.peer_lost(what, error, cause)
            raise


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Returns every rank's value, by rank, on every rank. Collective over `group`, which holds all ranks."""
    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


def by_reason(reasons: Mapping[int, str]) -> str:
    """Joins reasons into one line, grouping the ranks that give the same one; just the reason in a world of one."""
    if world_size() == 1:
        return reasons[0]
    ranks: dict[str, list[str]] = {}
    for number, reason in sorted(reasons.items()):
        ranks.setdefault(reason, []).append(str(number))
    return "; ".join(f"rank {', '.join(who)}: {reason}" for reason, who in ranks.items())
