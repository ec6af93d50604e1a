"""Collective error checks of ranks that read, write and send weights: no rank continues unless all ranks can."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from mrl.parallel import CollectiveErrorCheck, rank, world_size
from mrl.parallel.error_check import by_reason
from mrl.weights.errors import SyncError, SyncMismatch, WeightError

MAX_LISTED = 40


class WeightAgreement(CollectiveErrorCheck[list[str]]):
    """Collective check that raises WeightError with a list of problems. A problem that several ranks report in the same
    words is listed once, with the first rank that saw it.
    """

    def report(self, error: BaseException) -> list[str]:
        return [_reason(error, OSError, RuntimeError, ValueError)]

    def combined_error(self, what: str, reports: Mapping[int, list[str]]) -> WeightError:
        first_seen: dict[str, int] = {}
        for number, problems in reports.items():
            for problem in problems:
                first_seen.setdefault(problem, number)
        lines = [text if world_size() == 1 else f"{text} (rank {number})" for text, number in first_seen.items()]
        if len(lines) > MAX_LISTED:
            lines[MAX_LISTED:] = [f"and {len(lines) - MAX_LISTED} more"]
        return WeightError(f"{what}:\n" + "\n".join(f"  - {line}" for line in lines))


def raise_together(problems: list[str], what: str) -> None:
    """Collective over the world: raises one WeightError, the same on every rank, if any rank has a problem."""
    WeightAgreement().exchange(what, None, problems or None)


Report = tuple[str, bool]  # the reason, and whether it is a mismatch


class SyncAgreement(CollectiveErrorCheck[Report]):
    """Collective check that raises SyncError, which says what was attempted and each rank's reason; SyncMismatch if one
    rank raised that. Uses a CPU group of its own: construction is collective.

    timeout_s: longest wait for the slowest rank; a dead rank is noticed at once.
    """

    def __init__(self, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        super().__init__(dist.new_group(backend="gloo", timeout=timeout) if world_size() > 1 else None)
        self.rank, self._timeout_s = rank(), timeout_s

    def report(self, error: BaseException) -> Report:
        return _reason(error, OSError), isinstance(error, SyncMismatch)

    def combined_error(self, what: str, reports: Mapping[int, Report]) -> SyncError:
        kind = SyncMismatch if any(mismatch for _, mismatch in reports.values()) else SyncError
        return kind(f"{what} failed: {by_reason({number: text for number, (text, _) in reports.items()})}")

    def peer_lost(self, what: str, error: RuntimeError, cause: BaseException | None) -> None:
        waited = f"(waited at most {self._timeout_s:.0f} s)"
        raise SyncError(f"rank {self.rank} lost contact with the other ranks while {what} {waited}: {error}") from error


def _reason(error: BaseException, *plain: type[BaseException]) -> str:
    """Returns the error's message, prefixed with its type unless that is one of `plain` or defined in mrl."""
    known = isinstance(error, plain) or type(error).__module__.startswith("mrl.")
    return str(error) if known and str(error) else f"{type(error).__name__}: {error}"
