"""What every trainer starts with: the process group, a control group for results of rank 0, seeds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from mrl import failure, platform
from mrl.parallel import Meshes, rank

T = TypeVar("T")


class RankZeroError(RuntimeError):
    """Something only rank 0 does (the engine, rewards, files) failed; raised on every rank with rank 0's message."""


class World:
    """The torchrun world. `wait_s` bounds how long the other ranks wait for rank 0's part of a step."""

    def __init__(self, timeout_s: float, wait_s: float, seed: int) -> None:
        platform.init_process_group(timeout_s)
        torch.manual_seed(seed)
        self.is_main = rank() == 0
        self.meshes = Meshes(timeout_s, seed)
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))

    def from_main(self, what: str, make: Callable[[], T]) -> T:
        """Runs `make` on rank 0 and gives its result to every rank; if it fails, every rank raises."""
        box: list[tuple[T | None, str | None]] = [(None, None)]
        cause: Exception | None = None
        if self.is_main:
            try:
                box = [(make(), None)]
            except Exception as error:
                cause, box = error, [(None, failure.describe(error))]
        dist.broadcast_object_list(box, src=0, group=self._control)
        value, problem = box[0]
        if problem is not None:
            raise RankZeroError(f"{what} failed: {problem}") from cause
        return value  # type: ignore[return-value]

    def close(self) -> None:
        dist.destroy_process_group()
