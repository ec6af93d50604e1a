"""Queue of requests between the thread that creates them and the one that sends them."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from mrl.core import Request

CHECK_S = 1.0  # between two checks whether the producer is still alive


class RequestQueue:
    """Batches of requests, in the order in which they were put. One thread takes them. The queue also ends with the
    thread that created it."""

    def __init__(self) -> None:
        self._owner = threading.current_thread()
        self._batches: deque[Sequence[Request]] = deque()
        self._has_ended = False
        self._wake: Callable[[], object] = lambda: None

    def put(self, requests: Sequence[Request]) -> None:
        """Adds a batch. Any thread may call it."""
        self._batches.append(requests)
        self._notify()

    def end(self) -> None:
        """Says that no more will come. Any thread may call it."""
        self._has_ended = True
        self._notify()

    @property
    def _is_over(self) -> bool:
        return self._has_ended or not self._owner.is_alive()

    def _notify(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._wake()

    def take(self, waits: bool) -> list[Request]:
        """Returns all requests that have been put and not taken yet. waits: blocks until there are some, or the queue
        has ended."""
        changed = threading.Event()
        self._wake = changed.set
        while True:
            changed.clear()
            has_ended, found = self._is_over, list[Request]()
            while self._batches:
                found += self._batches.popleft()
            if found or has_ended or not waits:
                return found
            changed.wait(CHECK_S)

    async def batches(self) -> AsyncIterator[Sequence[Request]]:
        """Yields batches as they come, until the end."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(changed.set)
        while True:
            changed.clear()
            has_ended = self._is_over
            while self._batches:
                yield self._batches.popleft()
            if has_ended:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), CHECK_S)
