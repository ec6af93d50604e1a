"""Worker pool of a conversion: threads on every rank of the world."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch.serialization import set_crc32_options

from mrl.parallel import rank, world_size
from mrl.weights.agreement import WeightAgreement
from mrl.weights.convert.blocks import WorkerShare, write_share
from mrl.weights.disk.torch_dist_files import BlockLocation
from mrl.weights.errors import WeightError

END_TIMEOUT_S = 30.0  # wait for stopped workers, before their files are removed


class WorkerPool:
    """Worker pool with `workers` threads on each rank. Every method is collective over the world.

    timeout_s: longest wait for the slowest worker.
    """

    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers, self.timeout_s = workers, timeout_s
        self.size = workers * world_size()
        self._ranks = WeightAgreement()

    @property
    def is_main(self) -> bool:
        return rank() == 0

    def on_main(self, what: str, action: Callable[[], object]) -> None:
        """Runs `action` on rank 0; raises its error, if any, on every rank."""
        self._ranks.together(f"{what} failed", action if self.is_main else lambda: None)

    def write_shares(self, shares: Sequence[WorkerShare]) -> list[BlockLocation]:
        """Writes one share a worker; returns the locations of the blocks on every rank. Raises the same WeightError on
        every rank.
        """
        mine = [share for share in shares[rank() :: world_size()] if share.blocks or share.objects]
        everyone = self._ranks.each("the conversion failed", lambda: self._write_at_once(mine))
        return [item for items in everyone for item in items]

    def _write_at_once(self, shares: Sequence[WorkerShare]) -> list[BlockLocation]:
        done: queue.SimpleQueue[list[BlockLocation] | Exception] = queue.SimpleQueue()
        stop = threading.Event()

        def work(share: WorkerShare) -> None:
            torch.set_num_threads(1)  # thread-local settings, as is the next one
            set_crc32_options(False)  # a checksum would take as long as the writing, and no reader asks for it
            try:
                done.put(write_share(share, stop.is_set))
            except Exception as error:  # noqa: BLE001 (raised again by the waiting thread)
                done.put(error)

        workers = [threading.Thread(target=work, args=(share,), daemon=True) for share in shares]
        end = time.monotonic() + self.timeout_s
        items: list[BlockLocation] = []
        try:
            for worker in workers:
                worker.start()
            for _ in workers:
                found = done.get(timeout=max(0.0, end - time.monotonic()))
                if isinstance(found, Exception):
                    raise found
                items += found
        except queue.Empty:
            raise WeightError(f"{len(shares)} worker thread(s) did not finish within {self.timeout_s:g} s") from None
        finally:
            stop.set()
            ended = time.monotonic() + END_TIMEOUT_S
            for worker in filter(threading.Thread.is_alive, workers):
                worker.join(max(0.0, ended - time.monotonic()))
        return items
