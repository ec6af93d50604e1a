"""Engine pool of a run: state of the servers, their memory, restarts of lost ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from mrl.inference.access import Access
from mrl.inference.agent import OtherNode
from mrl.inference.client import EngineClient
from mrl.inference.errors import EngineError, EngineStartError, PortTaken, RolloutError
from mrl.inference.load import Meter
from mrl.inference.process import EngineProcess, Started
from mrl.inference.server import DEATH_POLL_S, DEATH_WAIT_S, Parts, Restarts, Server
from mrl.inference.server_info import ServerInfo
from mrl.stopping import run_coroutine

Check = Callable[[str], tuple[ServerInfo, Sequence[str]]]
Weights = Callable[[str], Awaitable[None]]  # waits until the engine at an address has received them

RESTART_POLL_S = 0.25
CHECKS_AT_ONCE = 64

log = logging.getLogger(__name__)


class EnginePool:
    """The servers of a run.

    joining: checked servers without the run's weights, which take no requests
    access: credentials for all servers
    check: returns the settings of the server at a URL, and notes for the user; raises if it must not be used
    notes: of all checked servers, one sentence each
    tensor: tensor-parallel ranks of each checked server; 0 before the first check
    waiting: meter of requests that have not been sent to a server yet
    is_syncing: all engines are receiving weights
    adapters: names of the loaded LoRA adapters, by name of the run's adapter, where weight syncs send adapters
    restarts: restarts of lost servers; none are allowed before `restarts.allow`
    silence_s: seconds without an answer after which a node counts as gone; 0: the run needs all nodes
    nodes: other nodes that run some of the servers
    memory_timeout_s: limit for releasing or restoring the memory of a server
    wait_for: blocks until the server at a URL responds, for servers that mrl did not start
    """

    silence_s = 0.0

    def __init__(
        self,
        servers: Sequence[Server],
        access: Access,
        check: Check,
        *,
        startup_timeout_s: float,
        max_restarts: int,
        nodes: Sequence[OtherNode] = (),
        memory_timeout_s: float,
        wait_for: Callable[[str], None] | None = None,
    ) -> None:
        self.servers, self.joining = tuple(servers), tuple[Server, ...]()
        self.access = access
        self.notes: list[str] = []
        self.tensor = 0
        self.restarts = Restarts(max_restarts)
        self.waiting = Meter()
        self.is_syncing = False
        self.adapters: Mapping[str, str] = {}
        self._nodes = nodes
        self._check, self._startup_timeout_s = check, startup_timeout_s
        self._memory_timeout_s, self._wait_for = memory_timeout_s, wait_for
        self._ready = False

    @property
    def processes(self) -> list[EngineProcess]:
        """Processes of the servers that mrl started on this node."""
        return [process for started in self._started for process in started.here]

    @property
    def _started(self) -> list[Started]:
        return [server.process for server in self.all if server.process is not None]

    def client(self, url: str, timeout_s: float = 300.0) -> EngineClient:
        """Returns a client of the server at `url`; the caller closes it."""
        return EngineClient(url, timeout_s, self.access)

    def wait_ready(self) -> None:
        """Blocks until every server responds and has been checked. Raises EngineStartError if a server that mrl started
        does not start or one of rollout.urls does not respond in time, EngineError if that serves another model."""
        if self._ready:
            return
        for process in self._started:
            process.wait_ready(self._startup_timeout_s)
        if (wait_for := self._wait_for) is not None:
            for server in self.servers:
                wait_for(server.url)  # in this thread, which signals end
        with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
            for server, found in zip(self.servers, pool.map(lambda one: self._check(one.url), self.servers)):
                self._take_in(server, found)
        self._ready = True

    def close(self) -> None:
        """Ends the servers that mrl started on this node. Those of other nodes end with the ranks there; servers of
        rollout.urls keep running."""
        for node in self._nodes:
            node.close()
        for process in self.processes:
            process.close()

    # ---- servers that come and go with nodes that may leave: see `OpenEnginePool`

    @property
    def all(self) -> tuple[Server, ...]:
        """All servers that receive weights."""
        return (*self.servers, *self.joining)

    def admit(self) -> tuple[Server, ...]:
        """Returns servers that have joined since the last call and need weights: none in this pool."""
        return ()

    def use_joined(self, *servers: Server) -> None:
        """Makes joining servers, these or all, ordinary servers: they have the weights now."""
        joined = servers or self.joining
        for server in joined:
            server.up = server.has_weights = True
        self.servers += tuple(server for server in joined if server not in self.servers)
        self.joining = tuple(server for server in self.joining if server not in joined)

    def has_left(self, server: Server) -> bool:
        """Returns True if the server is gone with its node; the run goes on without it."""
        if server.process is None or not server.process.is_gone:
            return False
        server.up = False
        if server in self.all:
            self.servers = tuple(one for one in self.servers if one is not server)
            self.joining = tuple(one for one in self.joining if one is not server)
            self.restarts.say(f"{server.process.name} has left; engines that go on: {len(self.servers)}")
        return True

    async def leaves_soon(self, server: Server) -> bool:
        """Returns True if the server `has_left`, now or soon: the end of a node's engines may be noticed before that of
        the node."""
        end = time.monotonic() + (DEATH_WAIT_S if self.silence_s else 0.0)
        while not (has_left := self.has_left(server)) and time.monotonic() < end:
            await asyncio.sleep(DEATH_POLL_S)
        return has_left

    def present(self) -> tuple[Server, ...]:
        """Returns all servers that the next weight sync is for. Waits while there is none; raises as `admit`."""
        while True:
            for server in self.all:
                self.has_left(server)
            self.admit()
            if self.all:
                return self.all
            time.sleep(RESTART_POLL_S)

    async def bring_in(self, server: Server, weights: Weights) -> None:
        """Waits until a joining server has its weights or has left."""
        try:
            await weights(server.url)
        except Exception:
            if not await self.leaves_soon(server):
                raise
        else:
            self.use_joined(server)

    def end_of_run(self) -> None:
        """Ends all `mrl serve` of this run, after its last step; none in this pool."""

    # ---- servers that are lost

    def least_loaded(self) -> Server | None:
        """Returns the one with the fewest requests, of those that are up and have weights."""
        up = (server for server in self.servers if server.up and server.has_weights)
        return min(up, key=lambda server: server.meter.running, default=None)

    def forget_losses(self) -> None:
        """Servers that were given up while they were brought back are tried again."""
        for server in self.servers:
            server.up = True

    def lose(self, server: Server, error: RolloutError) -> None:
        """Takes one restart for a server that is gone or hangs; it is down until `bring_back` is done. Raises `error`
        if the server cannot be restarted."""
        if server.process is None:
            raise error
        self.restarts.take(server.process, error)
        server.up = False

    async def bring_back(self, server: Server, weights: Weights | None = None) -> None:
        """Restarts a lost server, with as many more restarts as it takes. weights: waits until it has those that it had
        before; None: it goes without until the next weight sync."""
        process = server.process
        assert process is not None, "only servers that mrl started are lost"
        while True:
            try:
                await self._start_again(server, process)
                if weights is not None and server.has_weights:
                    await weights(server.url)
                break
            except Exception as error:
                if isinstance(error, PortTaken) or not await server.ends_soon():
                    raise
                if await self.leaves_soon(server):
                    return
                again = f"engine died again before it had its weights: {process.exit_report()}"
                self.restarts.take(process, RolloutError(again))
        server.restarts += 1
        server.up = True

    def revive(self, error: Exception) -> bool:
        """Restarts the engines that died in a failed weight sync, which release as much memory as before; the caller
        syncs the weights again.

        Returns whether there was such a server and a restart left for it.
        """
        end = time.monotonic() + DEATH_WAIT_S + self.silence_s
        while not (dead := [one for one in self.all if one.has_ended]) and self._started and time.monotonic() < end:
            time.sleep(DEATH_POLL_S)
        for server in dead:
            assert server.process is not None, "only servers that mrl started have ended"
            if self.has_left(server):
                continue
            if not self.restarts.is_left():
                return False
            self.restarts.take(server.process, error)
            released = server.released
            server.has_weights = False
            run_coroutine(self._start_again(server, server.process))
            server.restarts += 1
            self._settle(server, released)
        return bool(dead)

    async def _start_again(self, server: Server, process: Started) -> None:
        """Restarts the process and returns when it has been checked, with the weights of its model directory. All that
        may block runs in other threads."""
        await asyncio.to_thread(process.restart)
        server.released = frozenset()
        while not await asyncio.to_thread(process.is_ready, self._startup_timeout_s):
            await asyncio.sleep(RESTART_POLL_S)
        self._take_in(server, await asyncio.to_thread(self._check, server.url))

    # ---- memory

    def settle(self, change: Callable[[Parts], Parts]) -> None:
        """Brings every server from the parts of memory that it has given up to `change` of them, all at once.

        One that dies or does not answer in it is lost, started again, and brought there too, without its weights.
        Raises RolloutError when that is not allowed, or if a server refuses.
        """
        wanted = {server: change(server.released) for server in self.servers}
        todo = list(self.servers)
        while todo:
            with ThreadPoolExecutor(len(todo)) as pool:
                tries = {server: pool.submit(self._settle, server, wanted[server]) for server in todo}
            failed = {server: error for server, tried in tries.items() if (error := tried.exception()) is not None}
            for server, error in failed.items():
                self._replace(server, error)
            todo = list(failed)

    def _settle(self, server: Server, wanted: Parts) -> None:
        with closing(self.client(server.url, self._memory_timeout_s)) as client:
            server.settle(wanted, client)

    def _replace(self, server: Server, error: BaseException) -> None:
        """Restarts a server that failed to release or restore memory, unless it just refused."""
        if not isinstance(error, EngineError):
            raise error
        refuses = error.status is not None and error.status < 500
        ended = not refuses and run_coroutine(server.ends_soon())
        problem = RolloutError(f"{error}\n{server.exit_report()}".strip() if not refuses else str(error))
        if error.status is not None and not ended:
            raise problem from error
        self.lose(server, problem)
        server.has_weights = False  # the trainer's are not at hand now
        run_coroutine(self.bring_back(server))

    # ---- checks

    def _take_in(self, server: Server, checked: tuple[ServerInfo, Sequence[str]]) -> None:
        server.info, notes = checked
        tensor = server.info.tensor or 1
        if self.tensor not in (0, tensor):
            raise EngineStartError(
                f"engine {server.url} has {tensor} tensor-parallel ranks (--tp-size), another one {self.tensor}: a "
                "sync is made for engines that are alike"
            )
        self.tensor = tensor
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                log.warning("%s", note)
