"""The servers of a run: which are up, how busy each is, and how one that was lost comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mrl.rollout.access import Access
from mrl.rollout.client import EngineClient
from mrl.rollout.elsewhere import OtherNode
from mrl.rollout.errors import PortTaken, RolloutError
from mrl.rollout.process import EngineProcess, Started, wait_ready
from mrl.rollout.restarts import Restarts

RESTART_POLL_S = 0.25
DEATH_POLL_S = 0.05
DEATH_WAIT_S = 3.0  # a connection breaks a moment before the process is seen to end

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """A server that may be used.

    notes: what the user should know about it before the run starts, one sentence each
    accepts_stop_strings: it knows text
    """

    notes: tuple[str, ...]
    accepts_stop_strings: bool


@dataclass(eq=False)
class Server:
    """One engine.

    process: None for one that mrl did not start
    load: requests in flight
    life: counts its restarts, so that the failure of an earlier life is not taken for one of this
    up: False from its loss until it is started again, checked, and has its weights
    """

    url: str
    process: Started | None = None
    load: int = 0
    life: int = 0
    up: bool = True

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.exit_code() is not None

    async def ends_soon(self) -> bool:
        """Whether the process behind a failure is gone, or is so in a moment."""
        end = time.monotonic() + DEATH_WAIT_S
        while self.process and not self.has_ended and time.monotonic() < end:
            await asyncio.sleep(DEATH_POLL_S)
        return self.has_ended

    def obituary(self) -> str:
        """For the end of an error message; empty for one that mrl did not start."""
        return "" if self.process is None else self.process.obituary()


class Fleet:
    """The servers of a run.

    access: what opens them
    check: raises if the server at a URL must not be used
    notes: of all that were checked
    accepts_stop_strings: whether all do that were checked
    restarts: who may start a lost server again; nobody, until `restarts.allow` is called
    nodes: those that have some of the servers, besides this one
    """

    def __init__(
        self,
        servers: Sequence[Server],
        access: Access,
        check: Callable[[str], Checked],
        *,
        startup_timeout_s: float,
        max_restarts: int,
        nodes: Sequence[OtherNode] = (),
    ) -> None:
        self.servers = tuple(servers)
        self.access = access
        self.notes: list[str] = []
        self.accepts_stop_strings = True
        self.restarts = Restarts(max_restarts)
        self._nodes = nodes
        self._check, self._startup_timeout_s = check, startup_timeout_s
        self._ready = False

    @property
    def processes(self) -> list[EngineProcess]:
        """Of the servers that mrl started on this node."""
        return [process for process in self._started if isinstance(process, EngineProcess)]

    @property
    def _started(self) -> list[Started]:
        return [server.process for server in self.servers if server.process is not None]

    def client(self, url: str, timeout_s: float) -> EngineClient:
        """Of the server at `url`; its caller closes it."""
        return EngineClient(url, timeout_s, self.access)

    def wait_ready(self) -> None:
        """Until every server answers and has been checked. Raises EngineStartError when one of ours does not come up,
        EngineError when a given one does not answer or serves something else."""
        if self._ready:
            return
        for process in self._started:
            wait_ready(process, self._startup_timeout_s)
        for server in self.servers:
            self._take_in(server)
        self._ready = True

    def close(self) -> None:
        """Ends the servers that mrl started on this node; those of others end with the ranks that own them, and what
        mrl did not start is left alone."""
        for node in self._nodes:
            node.close()
        for process in self.processes:
            process.close()

    # ---- servers that are lost

    def least_loaded(self) -> Server | None:
        """Of those that are up."""
        return min((server for server in self.servers if server.up), key=lambda server: server.load, default=None)

    def forget_losses(self) -> None:
        """Servers that were given up while they were brought back are tried again."""
        for server in self.servers:
            server.up = True

    def lose(self, server: Server, error: RolloutError) -> None:
        """Takes one of the restarts for a server that is gone or hangs; it is down until `bring_back` is done. Raises
        `error` if it cannot be started again."""
        if server.process is None:
            raise error
        self.restarts.take(server.process, error)
        server.up = False

    async def bring_back(self, server: Server) -> None:
        """Until a lost server has been started again and has its weights, with as many more restarts as it takes."""
        process = server.process
        assert process is not None, "only ours are lost"
        while True:
            try:
                await self._start_again(server, process)
                self.restarts.give_weights(server.url)
                break
            except Exception as error:
                if isinstance(error, PortTaken) or not await server.ends_soon():
                    raise
                again = f"engine died again before it had its weights: {process.obituary()}"
                self.restarts.take(process, RolloutError(again))
        server.life += 1
        server.up = True

    def revive(self, error: Exception) -> bool:
        """After a failed push of weights: starts again what has died in it; the weights are for the caller to push.

        Returns whether there was such a server and a restart left for it.
        """
        end = time.monotonic() + DEATH_WAIT_S
        while not (dead := self._dead()) and self._started and time.monotonic() < end:
            time.sleep(DEATH_POLL_S)
        for server, process in dead:
            if not self.restarts.is_left():
                return False
            self.restarts.take(process, error)
            asyncio.run(self._start_again(server, process))
        return bool(dead)

    def _dead(self) -> list[tuple[Server, Started]]:
        return [(server, server.process) for server in self.servers if server.process and server.has_ended]

    async def _start_again(self, server: Server, process: Started) -> None:
        """Until the server answers and has been checked. It has the weights of its model directory then."""
        process.restart()
        while not process.is_ready(self._startup_timeout_s):
            await asyncio.sleep(RESTART_POLL_S)
        self._take_in(server)

    def _take_in(self, server: Server) -> None:
        found = self._check(server.url)
        self.accepts_stop_strings &= found.accepts_stop_strings
        for note in found.notes:
            if note not in self.notes:
                self.notes.append(note)
                log.warning("%s", note)
