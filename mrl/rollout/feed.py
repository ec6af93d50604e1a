"""Requests that one thread puts, and another takes as they come."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from mrl.core import Request


class Feed:
    """Several requests each time, in the order in which they were put. To be taken by one thread."""

    def __init__(self) -> None:
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

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._wake()

    def take(self, waits: bool) -> list[Request]:
        """All that has been put and not taken yet. waits: for some, if there is none; after the end there is none."""
        changed = threading.Event()
        self._wake = changed.set
        while True:
            changed.clear()
            has_ended, found = self._has_ended, list[Request]()
            while self._fed:
                found += self._fed.popleft()
            if found or has_ended or not waits:
                return found
            changed.wait()

    async def taken(self) -> AsyncIterator[Sequence[Request]]:
        """Until the end."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(changed.set)
        while True:
            changed.clear()
            has_ended = self._has_ended
            while self._fed:
                yield self._fed.popleft()
            if has_ended:
                return
            await changed.wait()
