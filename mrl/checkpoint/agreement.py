"""Collective error check of the ranks that write or read one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.checkpoint.api import CheckpointException

from mrl.files import file_error
from mrl.parallel import CollectiveErrorCheck, rank, world_size
from mrl.parallel.error_check import by_reason
from mrl.weights.errors import WeightError

Report = dict[int, str]  # reason by rank: torch may have gathered several ranks' reasons


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on every rank, with each rank's reason."""


class CheckpointAgreement(CollectiveErrorCheck[Report]):
    """Error check that raises CheckpointError. A thread that runs beside the training needs its own group."""

    caught = (Exception, CheckpointException)  # torch's CheckpointException is not an Exception

    def report(self, error: BaseException) -> Report:
        if isinstance(error, CheckpointException):
            return {number: describe(reason) for number, (reason, _) in error.failures.items()}
        return {rank(): describe(error)}

    def combined_error(self, what: str, reports: Mapping[int, Report]) -> CheckpointError:
        reasons = {number: reason for report in reports.values() for number, reason in report.items()}
        alike = len(reasons) == world_size() and len(set(reasons.values())) == 1
        return CheckpointError(f"{what} failed: {reasons[0] if alike else by_reason(reasons)}")

    def peer_lost(self, what: str, error: RuntimeError, cause: BaseException | None) -> None:
        mine = f" (here: {describe(cause)})" if cause else ""
        raise CheckpointError(f"{what}: another rank did not respond: {error}{mine}") from (cause or error)


def describe(error: BaseException) -> str:
    """Returns the error's message, with its type unless it is one of this program's errors."""
    if isinstance(error, CheckpointError | WeightError):
        return str(error)
    found = file_error(error)
    return f"{type(found).__name__}: {found}"


RANKS = CheckpointAgreement()
