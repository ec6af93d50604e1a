"""Engine pool whose servers join and leave with the nodes that run `mrl serve`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mrl.config.schema import PlacementConfig
from mrl.inference.agent import OtherNode
from mrl.inference.engine_pool import EnginePool
from mrl.inference.errors import EngineError, EngineStartError, RolloutError
from mrl.inference.membership import ListedNode, NodeRecord, RouterProcess, differences
from mrl.inference.server import Server

LOOK_S = 0.5  # between questions to the router
WAIT_POLL_S = 0.25
ROUTER_START_S = 120.0
TOLD_AT_ONCE = 64


class OpenEnginePool(EnginePool):
    """Engine pool without servers until as many nodes are ready as the run waits for.

    router: the nodes register with it; it ends with the pool
    serves: settings that the nodes must share, by key
    """

    def __init__(
        self, router: RouterProcess, placement: PlacementConfig, serves: Mapping[str, Any], *pool: Any, **settings: Any
    ) -> None:
        super().__init__((), *pool, **settings)
        self._router, self._placement, self._serves = router, placement, serves
        self.silence_s = placement.silence_s
        self._listed: list[ListedNode] = []
        self._next_look = 0.0
        self._taken: dict[str, OtherNode] = {}  # by agent
        self._refused: dict[str, str] = {}  # why, by agent
        self._node_of: dict[Server, OtherNode] = {}
        self._empty_since: float | None = None
        self._gone: set[str] = set()  # agents that are to be removed from the router's list
        self._admitting, self._looking = threading.Lock(), threading.Lock()

    def wait_ready(self) -> None:
        """Blocks until the nodes that the run waits for are ready, and their servers have been checked. Raises
        EngineStartError after `placement.wait_s`, with the state of every node."""
        if not self._ready:
            self._router.wait_ready(ROUTER_START_S)
        end, size = time.monotonic() + self._placement.wait_s, self._placement.nodes_per_engine
        while not self._ready:
            ready = self._ready_nodes()
            if len(ready) * size >= self._placement.nodes:
                self.admit()
                self._ready = len(self._ready_nodes()) * size >= self._placement.nodes
                self.use_joined()  # the first weight sync is for all
            elif time.monotonic() > end:
                raise EngineStartError(
                    f"{len(ready) * size} of {self._placement.nodes} engine nodes (placement.nodes) are ready after "
                    f"placement.wait_s = {self._placement.wait_s:g} s. Each is a `mrl serve` of this configuration, "
                    "with a --node of its own, that sees this run's directory and reaches the run's router "
                    f"{self._router.url} (placement.address)\n{self._known}"
                )
            time.sleep(WAIT_POLL_S)

    def close(self) -> None:
        """Ends the router. The nodes keep waiting for another run."""
        for node in self._taken.values():
            node.close()
        self._router.file.unlink(missing_ok=True)
        self._router.client.close()
        self._router.close()

    def end_of_run(self) -> None:
        self._look(at_once=True)

        def tell(record: NodeRecord) -> None:
            with contextlib.suppress(RolloutError), contextlib.closing(OtherNode(record.engines, self.access)) as node:
                node.end_of_run()

        with ThreadPoolExecutor(TOLD_AT_ONCE) as threads:
            list(threads.map(tell, [node.record for node in self._listed if node.healthy]))

    # ---- servers

    def admit(self) -> tuple[Server, ...]:
        """Checks the servers of nodes that have registered since the last call, and returns them: they are joining.
        Raises RolloutError if there has been no server for placement.wait_s."""
        found: tuple[Server, ...] = ()
        with self._admitting:
            for record in self._ready_nodes():
                if record.engines.agent in self._taken:
                    continue
                node = OtherNode(record.engines, self.access, silence_s=self.silence_s)
                self._taken[record.engines.agent] = node
                servers = tuple(Server(engine.url, engine, up=False, has_weights=False) for engine in node.engines)
                try:
                    for server in servers:
                        self._take_in(server, self._check(server.url))
                except (EngineError, RolloutError, EngineStartError) as error:
                    self._refused[record.engines.agent] = f"refused: {error}"
                    self._drop(node)
                    self.restarts.say(f"{record.engines.where} is not used: {error}")
                    continue
                self._node_of |= dict.fromkeys(servers, node)
                self.restarts.say(f"has come: {', '.join(engine.name for engine in node.engines)}")
                found += servers
            self.joining += found
            now, wait_s = time.monotonic(), self._placement.wait_s
            self._empty_since = None if self.all else self._empty_since or now
            if self._empty_since is not None and now - self._empty_since > wait_s:
                within = f"none has come within placement.wait_s = {wait_s:g} s"
                raise RolloutError(f"no engine is left, and {within}:\n{self._known}")
        return found

    def has_left(self, server: Server) -> bool:
        has_left = super().has_left(server)
        if has_left and (node := self._node_of.pop(server, None)) is not None:
            self._drop(node)
        return has_left

    # ---- nodes

    def _look(self, *, at_once: bool = False) -> None:
        """Reads the router's nodes, at most every LOOK_S; restarts the router if it has ended."""
        with self._looking, contextlib.suppress(RolloutError):
            if time.monotonic() < self._next_look and not at_once:
                return
            self._next_look = time.monotonic() + LOOK_S
            if self._router.exit_code() is not None:
                self._router.restart()
            self._listed = self._router.client.nodes()
            for node in self._listed:
                if node.record.engines.agent in self._gone:  # unless it has only seemed to be, and registers again
                    self._router.client.remove(node)
                    self._gone.remove(node.record.engines.agent)

    def _ready_nodes(self) -> list[NodeRecord]:
        """Returns the usable nodes; of nodes that share an engine, only the first, which answers requests."""
        self._look()
        good = {node.record.engines.node: node.record for node in self._listed if self._problem(node) is None}
        size = self._placement.nodes_per_engine
        return [one for number, one in sorted(good.items()) if number % size == 0 and one.state == "ready"]

    def _problem(self, node: ListedNode) -> str | None:
        """Returns the reason why the run cannot use a node; None if it can."""
        if wrong := differences(node.record.serves, self._serves):
            return f"of another configuration: {wrong}"
        if not node.healthy or node.record.engines.agent in self._gone:
            return f"no sign of life: its agent {node.record.engines.agent} does not answer"
        return self._refused.get(node.record.engines.agent)

    def _drop(self, node: OtherNode) -> None:
        """Drops a node. Nothing is sent to its address before it registers again."""
        node.close()
        self._gone.add(node.offered.agent)
        self._taken.pop(node.offered.agent, None)

    @property
    def _known(self) -> str:
        """Describes every node that has registered, one line each."""
        nodes = sorted(self._listed, key=lambda node: node.record.engines.node)
        lines = [f"  {node.record.engines.where}: {self._problem(node) or node.record.state}" for node in nodes]
        return "\n".join(lines) or "no node has ever been there"
