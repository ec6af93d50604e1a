"""Requests that one thread puts, and another takes as they come."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from mrl.core import Request

LOOK_S = 1.0  # between two looks at whether who feeds is still there


class Feed:
    """Several requests each time, in the order in which they were put. To be taken by one thread. It ends with the
    thread that has made it, too."""

    def __init__(self) -> None:
        self._owner = threading.current_thread()
        self._fed: deque[Sequence[Request]] = deque()
        self._has_ended = False
        self._wake: Callable[[], object] = lambda: None

    def put(self, requests: Sequence[Request]) -> None:
        """From any thread."""
        self._fed.append(requests)
        self._tell()

    def end(self) -> None:
        """No more will come. From any thread."""
        self._has_ended = True
        self._tell()

    @property
    def _is_over(self) -> bool:
        return self._has_ended or not self._owner.is_alive()

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._wake()

    def take(self, waits: bool) -> list[Request]:
        """All that has been put and not taken yet. waits: for some, if there is none; after the end there is none."""
        changed = threading.Event()
        self._wake = changed.set
        while True:
            changed.clear()
            has_ended, found = self._is_over, list[Request]()
            while self._fed:
                found += self._fed.popleft()
            if found or has_ended or not waits:
                return found
            changed.wait(LOOK_S)

    async def taken(self) -> AsyncIterator[Sequence[Request]]:
        """Until the end."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(changed.set)
        while True:
            changed.clear()
            has_ended = self._is_over
            while self._fed:
                yield self._fed.popleft()
            if has_ended:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), LOOK_S)
