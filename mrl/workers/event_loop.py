"""Event loop in a thread of its own, for work that other threads start and wait for."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
CLOSE_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


class EventLoopThread:
    """Runs coroutines in an event loop. name: of the thread; closed: raised for work after, or cut off by, `close`."""

    def __init__(self, name: str, closed: Exception) -> None:
        self._closed, self._is_closed = closed, False
        self._lock = threading.Lock()  # nothing is submitted after the loop is told to end
        self._tasks: set[asyncio.Task[Any] | None] = set()  # asyncio holds weak references alone
        self._loop, self._end = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine in the loop, from any thread."""
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop)
        work.close()
        raise self._closed

    def close(self) -> None:
        """Cancels all work and ends the thread; safe to call twice."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("%s: its work did not end within %.0f s", self._thread.name, CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._end.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        self._tasks.add(task := asyncio.current_task())
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_closed:
                raise self._closed from None
            raise
        finally:
            self._tasks.discard(task)
