"""Who does the shares of a conversion: this process, worker processes of its own, or the ranks of a world."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch.distributed as dist

from mrl.parallel import rank, world_size
from mrl.weights.conversion.blocks import Share, begin_worker, move
from mrl.weights.errors import WeightError, raise_together
from mrl.weights.torch_dist_files import Item


class Crew:
    """`workers` processes a rank of the world. Every method is collective over the world.

    timeout_s: longest wait for the slowest worker.
    """

    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers, self.timeout_s = workers, timeout_s
        self.size = workers * world_size()

    @property
    def is_main(self) -> bool:
        return rank() == 0

    def on_main(self, what: str, action: Callable[[], object]) -> None:
        """`action` on rank 0; its error, if any, on every rank."""
        problems = []
        if self.is_main:
            try:
                action()
            except (OSError, RuntimeError, ValueError) as error:
                problems.append(str(error))
        raise_together(problems, f"{what} failed")

    def move(self, shares: Sequence[Share]) -> list[Item]:
        """One share a worker; where the blocks lie, on every rank. Raises the same WeightError on every rank."""
        mine = [share for share in shares[rank() :: world_size()] if share.blocks or share.objects]
        items: list[Item] = []
        problems: list[str] = []
        try:
            items = self._processes(mine) if len(mine) > 1 else [item for share in mine for item in move(share)]
        except WeightError as error:
            problems.append(str(error))
        raise_together(problems, "the conversion failed")
        everyone: list[Any] = [items] * world_size()
        if world_size() > 1:
            dist.all_gather_object(everyone, items)
        return [item for some in everyone for item in some]

    def _processes(self, shares: Sequence[Share]) -> list[Item]:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(len(shares), context, initializer=begin_worker, initargs=(os.getpid(),))
        try:
            waiting = [pool.submit(move, share) for share in shares]
            return [item for done in as_completed(waiting, self.timeout_s) for item in done.result()]
        except BrokenProcessPool as error:
            raise WeightError("a worker process was killed: often by the kernel, when memory runs out") from error
        except TimeoutError:
            raise WeightError(f"waited {self.timeout_s:.0f} s for {len(shares)} worker processes") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
