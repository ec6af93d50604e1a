"""An engine pool whose servers join and leave with nodes of their own, which run `mrl serve`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from mrl.rollout.engine_pool import EnginePool, Weights
from mrl.rollout.errors import EngineError, EngineStartError, RolloutError
from mrl.rollout.group import Group
from mrl.rollout.members import Members
from mrl.rollout.server import DEATH_POLL_S, DEATH_WAIT_S, Server

WAIT_POLL_S = 0.25


class OpenEnginePool(EnginePool):
    """It is without servers until as many nodes are ready as the run was promised.

    members: the nodes
    newcomers: servers that have been checked, and lack the run's weights: no request goes there
    """

    def __init__(self, members: Members, *pool: Any, **settings: Any) -> None:
        super().__init__((), *pool, **settings)
        self.silence_s = members.silence_s
        self.newcomers: tuple[Server, ...] = ()
        self._members = members
        self._of: dict[Server, Group] = {}
        self._alone_since: float | None = None

    @property
    def all(self) -> tuple[Server, ...]:
        """With newcomers."""
        return (*self.servers, *self.newcomers)

    def wait_ready(self) -> None:
        """Until the nodes that were promised are ready, and their servers have been checked. Raises EngineStartError
        when they do not come."""
        while not self._ready:
            self._members.wait()
            self.admit()
            self._ready = not self._members.lacking
            self.welcome()  # the first push is for all

    def close(self) -> None:
        """The nodes go on for a while: the run may be started again."""
        self._members.close()

    def admit(self) -> tuple[Server, ...]:
        """What has come since the last time, checked: newcomers from now on."""
        found: tuple[Server, ...] = ()
        for group in self._members.arrivals():
            servers = tuple(Server(engine.url, engine, up=False, has_weights=False) for engine in group.engines)
            try:
                for server in servers:
                    self._take_in(server.url, self._check(server.url))
            except (EngineError, RolloutError, EngineStartError) as error:
                self._members.drop(group, refused=f"refused: {error}")
                self.restarts.say(f"{group.where} is not used: {error}")
                continue
            self._of |= dict.fromkeys(servers, group)
            names = (server.process.name for server in servers if server.process is not None)
            self.restarts.say(f"has come: {', '.join(names)}")
            found += servers
        self.newcomers += found
        return found

    def welcome(self, *servers: Server) -> None:
        """Newcomers, these or all, have the weights: they are servers like the others."""
        come = servers or self.newcomers
        for server in come:
            server.up = server.has_weights = True
        self.servers += tuple(server for server in come if server not in self.servers)
        self.newcomers = tuple(server for server in self.newcomers if server not in come)

    def is_left_by(self, server: Server) -> bool:
        """Whether the server is gone with its node; the run goes on without it."""
        if server.process is None or not server.process.is_gone:
            return False
        server.up = False
        if server in self.all:
            self.servers = tuple(one for one in self.servers if one is not server)
            self.newcomers = tuple(one for one in self.newcomers if one is not server)
            self.restarts.say(f"{server.process.name} has left; engines that go on: {len(self.servers)}")
        if (group := self._of.pop(server, None)) is not None:
            self._members.drop(group, refused=group.broken)  # its sign may say for a moment that it is ready
        return True

    async def is_soon_left_by(self, server: Server) -> bool:
        """As `is_left_by`, now or in a moment: a node's engines may be seen to end before the node is."""
        end = time.monotonic() + DEATH_WAIT_S
        while not (has_left := self.is_left_by(server)) and time.monotonic() < end:
            await asyncio.sleep(DEATH_POLL_S)
        return has_left

    def present(self) -> tuple[Server, ...]:
        """All that are to get weights, newcomers too, when those that have left are out. Waits while there is none;
        raises as `check_alone`."""
        while True:
            for server in self.all:
                self.is_left_by(server)
            self.admit()
            if self.all:
                return self.all
            self.check_alone()
            time.sleep(WAIT_POLL_S)

    def check_alone(self) -> None:
        """To be called again and again: raises RolloutError when there has been no server for placement.wait_s."""
        if self.all:
            self._alone_since = None
            return
        now = time.monotonic()
        self._alone_since = self._alone_since or now
        if now - self._alone_since > self._members.wait_s:
            limit = f"placement.wait_s = {self._members.wait_s:g} s"
            raise RolloutError(f"no engine is left, and none has come within {limit}:\n{self._members.known}")

    async def bring_in(self, server: Server, weights: Weights) -> None:
        """Waits until a joining server has its weights, unless it leaves again."""
        try:
            await weights(server.url)
        except Exception:
            if not await self.is_soon_left_by(server):
                raise
        else:
            self.welcome(server)

    def end_of_run(self) -> None:
        """The last step is made: `mrl serve` ends."""
        self._members.over()
