"""Errors of the weight room, and how one rank's error becomes everybody's."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mrl import platform

MAX_LISTED = 40


class WeightError(RuntimeError):
    """Weights could not be read, written or matched; the message names file, tensor and rank."""


class SyncError(WeightError):
    """A push of weights failed. The engines' weights are undefined until a push succeeds."""


class SyncMismatch(SyncError):
    """An engine does not hold what the trainer sent; the message names the tensors and both hashes."""


def raise_together(problems: list[str], what: str) -> None:
    """Collective over the world: raises one WeightError, the same on every rank, if any rank has a problem.

    A problem that several ranks report in the same words is listed once, with the first rank that saw it.
    """
    worlds = dist.get_world_size() if dist.is_initialized() else 1
    by_rank: list[list[str]] = [problems] * worlds
    if worlds > 1:
        dist.all_gather_object(by_rank, problems)
    first_seen: dict[str, int] = {}
    for rank, messages in enumerate(by_rank):
        for message in messages:
            first_seen.setdefault(message, rank)
    if not first_seen:
        return
    lines = [text if worlds == 1 else f"{text} (rank {rank})" for text, rank in first_seen.items()]
    if len(lines) > MAX_LISTED:
        lines[MAX_LISTED:] = [f"and {len(lines) - MAX_LISTED} more"]
    raise WeightError(f"{what}:\n" + "\n".join(f"  - {line}" for line in lines))


def on_any_rank(flag: bool) -> bool:
    """Collective over the world: whether the flag is set on some rank."""
    if not dist.is_initialized():
        return flag
    box = torch.tensor(int(flag), device=platform.device())
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return bool(box)
