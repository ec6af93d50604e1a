"""Work for a thread that waits on another one, such as a weight sync, which is collective and must run there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class CallerThread:
    """Runs in the thread that calls `serve` what other threads `put` or `call`, in their order."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def serve(self) -> None:
        """Runs the work until `close`. Raises what `put` work raises."""
        while (work := self._work.get()) is not None:
            work()

    def put(self, work: Callable[[], object]) -> None:
        """Adds work whose result nobody waits for."""
        self._work.put(work)

    async def call(self, work: Callable[[], T]) -> T:
        """Returns what `work` returns, or raises what it raises."""
        done: Future[T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)

        self._work.put(run)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Ends `serve` after all work that has been added."""
        self._work.put(None)
