"""State of one engine of a run: whether it is up, its load, its released memory, its restarts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from mrl.inference.client import EngineClient
from mrl.inference.errors import EngineError, RolloutError
from mrl.inference.load import Meter
from mrl.inference.process import Started, describe_exit
from mrl.inference.protocol import MEMORY_PARTS, RELEASE_MEMORY, MemoryPart
from mrl.inference.server_info import UNCHECKED, ServerInfo

log = logging.getLogger(__name__)


class Restarts:
    """Limit and count of engine restarts. None are allowed before `allow`, since a restarted engine needs the weights.

    made: restarts so far; post: calls a function in the main thread
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.made = limit, 0
        self.post: Callable[[Callable[[], object]], object] = lambda work: work()
        self._note: Callable[[str], None] | None = None
        self._give_weights: Callable[[str], None] | None = None

    def allow(self, note: Callable[[str], None], give_weights: Callable[[str], None]) -> None:
        """Allows restarts. note: shows a line to the user. give_weights: syncs the current weights and version to the
        engine at a URL, which has just been restarted and has sampled nothing."""
        self._note, self._give_weights = note, give_weights

    def say(self, line: str) -> None:
        """Shows a line to the user; before `allow`, writes it to the log."""
        tell = self._note or log.warning
        self.post(lambda: tell(line))

    def is_left(self) -> bool:
        """Returns True if one more restart is allowed."""
        return self._give_weights is not None and self.made < self.limit

    def take(self, process: Started, error: Exception) -> None:
        """Counts a restart and tells the user. Raises `error`, the cause of the loss, if no restart is left."""
        if not self.is_left():
            if self.made == 0:
                raise error
            used_up = f"rollout.max_restarts = {self.limit} restarts are used up"
            raise RolloutError(f"{error}\n{used_up}") from error
        self.made += 1
        code = process.exit_code()
        why = "does not answer" if code is None else f"ended with {describe_exit(code)}"
        self.say(f"{process.name} {why}: starting it again (restart {self.made} of {self.limit}; {process.log})")

    def give_weights(self, url: str) -> None:
        """Calls `give_weights` of `allow`."""
        assert self._give_weights is not None, "a restart was taken"
        self._give_weights(url)


DEATH_POLL_S = 0.05
DEATH_WAIT_S = 3.0  # a connection breaks a moment before the process is seen to end

Parts = frozenset[MemoryPart]


@dataclass(eq=False)
class Server:
    """One engine."""

    url: str
    process: Started | None = None  # None for a server that mrl did not start
    info: ServerInfo = UNCHECKED  # its settings, once it has been checked
    meter: Meter = field(default_factory=Meter)  # of its requests
    restarts: int = 0  # by which a failure before a restart is told from one after it
    up: bool = True  # False from its loss until it has been restarted and checked, and has its weights
    released: Parts = frozenset()  # parts of its memory that are released
    has_weights: bool = True  # False after their release, or a restart without them, until the next weight sync

    @property
    def has_ended(self) -> bool:
        return self.process is not None and (self.process.is_gone or self.process.exit_code() is not None)

    async def ends_soon(self) -> bool:
        """Returns True if the process behind a failure has ended, or ends within a moment."""
        end = time.monotonic() + DEATH_WAIT_S
        while self.process and not self.has_ended and time.monotonic() < end:
            await asyncio.sleep(DEATH_POLL_S)
        return self.has_ended

    def exit_report(self) -> str:
        """Returns text for the end of an error message; empty for a server that mrl did not start."""
        return "" if self.process is None else self.process.exit_report()

    def settle(self, wanted: Parts, client: EngineClient) -> None:
        """Releases and restores memory until exactly the parts in `wanted` are released.

        client: of this server; its `timeout_s` limits the wait for running requests, and for each answer
        Raises EngineError; `released` then still holds what the server has done.
        """
        limit = client.timeout_s
        if more := wanted - self.released:
            self.has_weights &= "weights" not in more
            try:  # SGLang exits if it has to release memory while it runs requests
                client.flush_when_idle(limit)
            except EngineError as error:
                if error.status != 400:
                    raise
                text = f"not asked: requests still run after {limit:g} s, and only an idle engine may give memory up"
                raise EngineError(self.url, RELEASE_MEMORY.name, None, text) from error
            client.timeout_s = limit
            client.release_memory(_in_order(more))
            self.released |= more
        if back := self.released - wanted:
            client.timeout_s = limit
            client.resume_memory(_in_order(back))
            self.released -= back

    def asleep(self) -> str | None:
        """Returns the reason why the server cannot sample now; None if it can."""
        if self.released:
            return f"engine {self.url} has given up its {', '.join(_in_order(self.released))}: take it back first"
        return None if self.has_weights else f"engine {self.url} lacks its weights: sync them first"


def _in_order(parts: Collection[MemoryPart]) -> list[MemoryPart]:
    return [part for part in MEMORY_PARTS if part in parts]
