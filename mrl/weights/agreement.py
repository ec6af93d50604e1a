"""How ranks that each talk to the outside world stay together: nobody goes on unless everybody can."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from mrl.weights.errors import SyncError, SyncMismatch, WeightError

T = TypeVar("T")


class Agreement:
    """Collective steps over the world, on a CPU group of its own. Construction is collective.

    timeout_s: longest wait for the slowest rank; a rank that died is noticed at once.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self._timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if self.world > 1 else None

    def attempt(self, what: str, action: Callable[[], T] | None) -> list[T | None]:
        """Runs `action` on the ranks that have one; all their results, by rank, on every rank.

        Raises the same SyncError on every rank if any rank's action raised: what was attempted and each rank's reason;
        a SyncMismatch if that is what one of them raised.
        """
        mine: T | None = None
        problem: Exception | None = None
        try:
            mine = action() if action is not None else None
        except Exception as caught:  # becomes everybody's error below
            problem = caught
        reports = self.gather(what, (_reason(problem), isinstance(problem, SyncMismatch), mine))
        failed = {rank: reason for rank, (reason, _, _) in enumerate(reports) if reason}
        if failed:
            kind = SyncMismatch if any(mismatch for _, mismatch, _ in reports) else SyncError
            raise kind(f"{what} failed: {self._listed(failed)}") from problem
        return [result for _, _, result in reports]

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise SyncError(
                f"rank {self.rank} lost contact with the other ranks while {what} (waited at most "
                f"{self._timeout_s:.0f} s): {error}"
            ) from error
        return values

    def collect(self, what: str, value: Any, owner: int) -> list[Any] | None:
        """Every rank's value, by rank, on `owner`; None elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.world if self.rank == owner else None
        try:
            dist.gather_object(value, values, dst=owner, group=self._group)
        except RuntimeError as error:
            raise SyncError(f"rank {self.rank} lost contact with the other ranks while {what}: {error}") from error
        return values

    def _listed(self, failed: dict[int, str]) -> str:
        """Ranks with the same reason are named together."""
        if self.world == 1:
            return failed[0]
        ranks: dict[str, list[str]] = {}
        for rank, reason in failed.items():
            ranks.setdefault(reason, []).append(str(rank))
        return "; ".join(f"rank {', '.join(who)}: {reason}" for reason, who in ranks.items())


def _reason(error: Exception | None) -> str:
    if error is None:
        return ""
    known = isinstance(error, (WeightError, OSError)) or type(error).__module__.startswith("mrl.")
    return str(error) if known else f"{type(error).__name__}: {error}"
