"""One outcome on every rank: what fails on one rank raises the same error on all of them, and none waits for it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mrl.files import file_error
from mrl.parallel import rank, world_size

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on every rank, with the ranks' own reasons."""


def together(what: str, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Runs `action` on every rank and returns this rank's result. Collective over `group`, which holds all ranks (the
    default one where it is left out; a thread beside the training needs one of its own).

    Raises CheckpointError on all ranks if it failed on any. An action that is itself collective must not fail on one
    rank between its collectives, or the others wait for the process group's time-out.
    """
    value: T | None = None
    failures: dict[int, str] = {}
    cause: BaseException | None = None
    try:
        value = action()
    except CheckpointException as error:  # torch has gathered the ranks' errors already; not an Exception
        failures, cause = {r: describe(e) for r, (e, _) in error.failures.items()}, error
    except Exception as error:
        failures, cause = {rank(): describe(error)}, error
    everyone = {r: reason for answer in _gather(what, failures, cause, group) for r, reason in answer.items()}
    if everyone:
        raise CheckpointError(f"{what} failed: {_by_reason(everyone)}") from cause
    return value  # type: ignore[return-value]


def on_main(what: str, action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Runs `action` on rank 0 and gives its (small, picklable) result to every rank; fails as `together` does."""
    box = [together(what, lambda: action() if rank() == 0 else None, group)]
    if world_size() > 1:
        dist.broadcast_object_list(box, src=0, group=group)
    return box[0]  # type: ignore[return-value]


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in the order of ranks."""
    box: list[T | None] = [None] * world_size()
    dist.all_gather_object(box, value, group=group)
    return box  # type: ignore[return-value]


def gather_on_main(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value on rank 0, nothing on the others."""
    box: list[T | None] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(value, box, dst=0, group=group)
    return box or []  # type: ignore[return-value]


def describe(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):  # its own text advises to load without safety
        return "a file does not hold what was written"
    found = file_error(error)
    return f"{type(found).__name__}: {found}"


def _gather(
    what: str, failures: dict[int, str], cause: BaseException | None, group: dist.ProcessGroup | None
) -> list[dict[int, str]]:
    try:
        return gather(failures, group)
    except RuntimeError as error:
        mine = f" (here: {describe(cause)})" if cause else ""
        raise CheckpointError(f"{what}: another rank did not answer: {error}{mine}") from (cause or error)


def _by_reason(reasons: dict[int, str]) -> str:
    """rank -> reason, with the ranks that give the same reason put together."""
    ranks: dict[str, list[int]] = {}
    for r, reason in sorted(reasons.items()):
        ranks.setdefault(reason, []).append(r)
    if len(ranks) == 1 and len(reasons) == world_size():
        return next(iter(ranks))
    return "; ".join(f"rank {', '.join(map(str, group))}: {reason}" for reason, group in ranks.items())
