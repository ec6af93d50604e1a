"""One engine of a run: whether it is up, what it has to do, which memory it has released; and its restarts."""

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

log = logging.getLogger(__name__)


class Restarts:
    """None are allowed before `allow`: an engine that nobody gives its weights would sample from the wrong ones.

    made: restarts so far; post: has a function called in the main thread
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.made = limit, 0
        self.post: Callable[[Callable[[], object]], object] = lambda work: work()
        self._note: Callable[[str], None] | None = None
        self._give_weights: Callable[[str], None] | None = None

    def allow(self, note: Callable[[str], None], give_weights: Callable[[str], None]) -> None:
        """note: takes one line for the user. give_weights: brings the engine at a URL, which has just been started and
        sampled nothing, to the weights and the version that the others have."""
        self._note, self._give_weights = note, give_weights

    def say(self, line: str) -> None:
        """Tells the user; writes to the log as long as nobody listens."""
        tell = self._note or log.warning
        self.post(lambda: tell(line))

    def is_left(self) -> bool:
        """Returns True if one more restart is allowed."""
        return self._give_weights is not None and self.made < self.limit

    def take(self, process: Started, error: Exception) -> None:
        """Counts one and tells the user. Raises `error`, what the engine was lost by, if none is left."""
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
        """Brings a server that was started again to the weights of the others, as `allow` was told."""
        assert self._give_weights is not None, "a restart was taken"
        self._give_weights(url)


DEATH_POLL_S = 0.05
DEATH_WAIT_S = 3.0  # a connection breaks a moment before the process is seen to end

Parts = frozenset[MemoryPart]


@dataclass(eq=False)
class Server:
    """One engine.

    process: None for one that mrl did not start
    meter: of its requests
    restarts: their number, so that a failure before a restart is not taken for one after it
    up: False from its loss until it is started again, checked, and has its weights
    released: parts of its memory that it has given up since its start
    has_weights: False from when it gave its weights up, or was started again without them, until the next weight sync
    """

    url: str
    process: Started | None = None
    meter: Meter = field(default_factory=Meter)
    restarts: int = 0
    up: bool = True
    released: Parts = frozenset()
    has_weights: bool = True

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
        """Gives up and takes back memory until `wanted` is what is given up; asks nothing of one that is so already.

        client: of this server; its `timeout_s` bounds the wait for the engine's requests to end, and each answer
        Raises EngineError; what the server had done until then is remembered.
        """
        limit = client.timeout_s
        if more := wanted - self.released:
            self.has_weights &= "weights" not in more
            self._wait_idle(client)
            client.timeout_s = limit
            client.release_memory(_in_order(more))
            self.released |= more
        if back := self.released - wanted:
            client.timeout_s = limit
            client.resume_memory(_in_order(back))
            self.released -= back

    def _wait_idle(self, client: EngineClient) -> None:
        """Waits until no request runs: SGLang ends itself when it is told to release memory during work."""
        limit = client.timeout_s
        try:
            client.flush_when_idle(limit)
        except EngineError as error:
            if error.status != 400:
                raise
            text = f"not asked: requests still run after {limit:g} s, and only an idle engine may give memory up"
            raise EngineError(self.url, RELEASE_MEMORY.name, None, text) from error

    def asleep(self) -> str | None:
        """Why it cannot sample; None if it can."""
        if self.released:
            return f"engine {self.url} has given up its {', '.join(_in_order(self.released))}: take it back first"
        return None if self.has_weights else f"engine {self.url} lacks its weights: sync them first"


def _in_order(parts: Collection[MemoryPart]) -> list[MemoryPart]:
    return [part for part in MEMORY_PARTS if part in parts]
