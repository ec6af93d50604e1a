"""Transport to engines that are larger than a node: every process of an engine reads a bucket in its own node's memory.

A bucket reaches one rank of every node as in `MultiNodeTransport`. A handle is valid on its own node only, so each of
these ranks makes the handles for the processes on its node, and the sender puts all of an engine's handles into one
request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from mrl import platform
from mrl.inference.client import EngineClient
from mrl.weights.errors import WeightError
from mrl.weights.sync.payload import Bucket
from mrl.weights.sync.transports.base import Engines, HandleTransport, SenderLocation, Transport
from mrl.weights.sync.transports.multi_node import GO, MultiNodeTransport, NodeTopology, Relay, Route

DONE = 2  # the engines have read the bucket, or will not


@dataclass(frozen=True)
class Handles:
    """Handles of one node, for an engine's processes there; problem: the reason why there are none."""

    handles: list[str]
    problem: str | None = None


class MultiNodeEngineTransport(MultiNodeTransport):
    """Transport to engines over several nodes. Construction is collective over the world."""

    _kind: type[HandleTransport]

    def __init__(
        self, kind: type[Transport], engines: Engines, location: SenderLocation, topology: NodeTopology
    ) -> None:
        if not issubclass(kind, HandleTransport):
            raise WeightError(f"sync.transport {kind.name} does not support engines over several nodes: leave it out")
        super().__init__(kind, engines, location, topology)

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        route = self._mine
        assert route is not None, "only senders send"
        self._unannounced -= 1
        route.send_command(GO)
        began = time.monotonic()
        route.start(flat[: bucket.nbytes]).wait()
        platform.synchronize()
        self.hops.network_s += time.monotonic() - began
        self.hops.network_bytes += bucket.nbytes * len(route.relays)
        began = time.monotonic()
        try:
            self._request(bucket, route.gather(_handles(self._here, bucket, flat)))
        finally:
            with contextlib.suppress(RuntimeError):  # a relay is gone, which its node reports
                route.send_command(DONE)
        self.hops.engine_s += time.monotonic() - began
        self.hops.engine_bytes += bucket.nbytes * len(self.engines.clients) * self._topology.nodes_per_engine

    def _request(self, bucket: Bucket, brought: Mapping[int, Handles]) -> None:
        for node, its in brought.items():
            if its.problem is not None:
                raise WeightError(f"node {node}: {its.problem}")

        def update(client: EngineClient) -> None:
            handles = [handle for node in self._topology.homes[client.url] for handle in brought[node].handles]
            client.update_weights_from_tensor(handles, load_format=self._kind.load_format)

        self.engines.call(update)

    def _relay(self, route: Route) -> Relay:
        return HandleRelay(route, self._topology, self._local())


class HandleRelay(Relay):
    """Delivers no bucket itself; keeps each bucket until the sender's request has been answered."""

    def _received(self, bucket: Bucket, flat: Tensor, wanted: bool) -> None:
        mine = _handles(self.local, bucket, flat) if wanted else Handles([])
        if mine.problem is not None:
            self._problem = WeightError(mine.problem)
        elif self._problem is not None:
            mine = Handles([], str(self._problem))
        self._route.gather(mine)
        self._route.receive_command()


def _handles(local: Transport, bucket: Bucket, flat: Tensor) -> Handles:
    """Returns the handles, or none if no engine is addressed here. Any error is reported to the sender."""
    if not local.engines.clients:
        return Handles([])
    try:
        return Handles(cast(HandleTransport, local).handles(bucket, flat))
    except Exception as error:
        return Handles([], str(error) or type(error).__name__)
