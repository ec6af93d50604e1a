"""To engines that are larger than a node: every process of one reads a bucket in the memory of its own node.

A bucket comes to a rank of every node as `OverNodes` brings it. A handle is good on its own node alone, so each of
these ranks makes those for the processes beside it, and the sender puts all of an engine's into one request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from mrl import platform
from mrl.rollout.client import EngineClient
from mrl.weights.errors import WeightError
from mrl.weights.sync.payload import Bucket
from mrl.weights.sync.transports.base import ByHandle, Engines, Place, Transport
from mrl.weights.sync.transports.over_nodes import GO, OverNodes, Relay, Route, Spread

DONE = 2  # the engines have read the bucket, or will not


@dataclass(frozen=True)
class Handles:
    """A node's, for the processes of an engine that it has; problem: why there are none."""

    handles: list[str]
    problem: str | None = None


class Spanning(OverNodes):
    """Construction is collective over the world."""

    _kind: type[ByHandle]

    def __init__(self, kind: type[Transport], engines: Engines, place: Place, spread: Spread) -> None:
        if not issubclass(kind, ByHandle):
            raise WeightError(f"sync.transport {kind.name} knows no engine larger than a node: leave it out")
        super().__init__(kind, engines, place, spread)

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        route = self._mine
        assert route is not None, "only senders send"
        self._untold -= 1
        route.tell(GO)
        began = time.monotonic()
        route.start(flat[: bucket.nbytes]).wait()
        platform.synchronize()
        self.hops.network_s += time.monotonic() - began
        self.hops.network_bytes += bucket.nbytes * len(route.relays)
        began = time.monotonic()
        try:
            self._ask(bucket, route.bring(_handles(self._here, bucket, flat)))
        finally:
            with contextlib.suppress(RuntimeError):  # a relay is gone, and its node says so
                route.tell(DONE)
        self.hops.engine_s += time.monotonic() - began
        self.hops.engine_bytes += bucket.nbytes * len(self.engines.clients) * self._spread.nodes_per_engine

    def _ask(self, bucket: Bucket, brought: Mapping[int, Handles]) -> None:
        for node, its in brought.items():
            if its.problem is not None:
                raise WeightError(f"node {node}: {its.problem}")

        def update(client: EngineClient) -> None:
            handles = [handle for node in self._spread.homes[client.url] for handle in brought[node].handles]
            client.update_weights_from_tensor(handles, load_format=self._kind.load_format)

        self.engines.call(update)

    def _relay(self, route: Route) -> Relay:
        return HandleRelay(route, self._spread, self._local())


class HandleRelay(Relay):
    """Hands on no bucket by itself; keeps each until the sender's request has been answered."""

    def _received(self, bucket: Bucket, flat: Tensor, wanted: bool) -> None:
        mine = _handles(self.local, bucket, flat) if wanted else Handles([])
        if mine.problem is not None:
            self._problem = WeightError(mine.problem)
        elif self._problem is not None:
            mine = Handles([], str(self._problem))
        self._route.bring(mine)
        self._route.hear()


def _handles(local: Transport, bucket: Bucket, flat: Tensor) -> Handles:
    """None where no engine is meant here. Whatever fails, the sender has to hear of it."""
    if not local.engines.clients:
        return Handles([])
    try:
        return Handles(cast(ByHandle, local).handles(bucket, flat))
    except Exception as error:
        return Handles([], str(error) or type(error).__name__)
