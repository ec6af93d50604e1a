"""Transport to engines on every node of the trainer: a bucket crosses the network once a node, then moves through
memory.

Its sender broadcasts it to one rank of every other node with engines. That rank delivers it as a local sender would:
through shared memory, or by CUDA IPC from its own GPU. No rank ever holds more than one bucket a sender.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform
from mrl.parallel import Nodes
from mrl.weights.errors import WeightError
from mrl.weights.sync.payload import Bucket
from mrl.weights.sync.transports.base import (
    RELAY_GRACE_S,
    Deadline,
    Engines,
    HopCosts,
    SenderLocation,
    Transport,
    largest_bucket_bytes,
)

GO, STOP = 1, 0
T = TypeVar("T")


@dataclass(frozen=True)
class NodeTopology:
    """Nodes of senders and engines. nodes: of the world. homes: the nodes of the engine at each address, several if it
    is larger than a node. buckets: every sender's, by its rank.
    """

    nodes: Nodes
    homes: Mapping[str, tuple[int, ...]]
    buckets: Mapping[int, Sequence[Bucket]]

    @property
    def is_over_nodes(self) -> bool:
        """True if a sender and an engine are on different nodes; False for engines at unknown locations."""
        places = self.engine_nodes | {self.nodes.of[sender] for sender in self.buckets}
        return bool(self.homes) and len(places) > 1

    @property
    def engine_nodes(self) -> set[int]:
        """Nodes that have an engine, or a part of one."""
        return {node for home in self.homes.values() for node in home}

    @property
    def nodes_per_engine(self) -> int:
        return max(map(len, self.homes.values()), default=1)


class Route:
    """Route from a sender to the other nodes. Construction is collective over the world.

    relays: the receiving rank of each node; each sender has its own, as far as a node has enough ranks
    """

    def __init__(self, topology: NodeTopology, sender: int, index: int, timeout_s: float) -> None:
        nodes = topology.nodes
        others = sorted(topology.engine_nodes - {nodes.of[sender]})
        self.sender, self._nodes = sender, nodes
        self.relays = {node: nodes.ranks(node)[index % len(nodes.ranks(node))] for node in others}
        self.is_relay = nodes.rank in self.relays.values()
        self._members, limit = sorted({sender, *self.relays.values()}), timedelta(seconds=timeout_s)
        self._control_group = dist.new_group(self._members, backend="gloo", timeout=limit)
        on_gpu = platform.backend() != "gloo"
        self._data_group = (
            dist.new_group(self._members, backend="nccl", timeout=limit) if on_gpu else self._control_group
        )

    def send_command(self, word: int) -> None:
        """Sends a command from the sender: GO before a bucket, STOP after the last one."""
        dist.broadcast(torch.tensor([word]), self.sender, group=self._control_group)

    def receive_command(self) -> int:
        """Receives the sender's command, on a relay."""
        word = torch.empty(1, dtype=torch.int64)
        dist.broadcast(word, self.sender, group=self._control_group)
        return int(word)

    def gather(self, mine: T) -> dict[int, T]:
        """Gathers small, picklable values of the sender and its relays to the sender, by node; an empty dict on the
        others.
        """
        values: list[Any] | None = [None] * len(self._members) if self._nodes.rank == self.sender else None
        dist.gather_object(mine, values, dst=self.sender, group=self._control_group)
        return dict(zip((self._nodes.of[member] for member in self._members), values or [], strict=False))

    def start(self, part: Tensor) -> Any:
        """Starts the broadcast of a bucket's bytes, uint8 [n], into `part` on relays; returns a handle with
        `wait()`.
        """
        return dist.broadcast(part, self.sender, group=self._data_group, async_op=True)


class MultiNodeTransport(Transport):
    """Transport `kind`, from one rank of every node. Construction is collective over the world."""

    def __init__(
        self, kind: type[Transport], engines: Engines, location: SenderLocation, topology: NodeTopology
    ) -> None:
        super().__init__(engines, location)
        self.name = f"{kind.name} over nodes"  # type: ignore[misc]
        self._kind, self._topology = kind, topology
        timeout_s = engines.deadline.seconds + RELAY_GRACE_S
        self._routes = [Route(topology, sender, i, timeout_s) for i, sender in enumerate(sorted(topology.buckets))]
        self._mine = next((route for route in self._routes if route.sender == location.rank), None)
        self._here = self._local()
        self._unannounced = 0

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        self._here = self._local()
        self._here.prepare(buckets)
        self._unannounced = len(buckets)

    def buffer(self, bucket: Bucket) -> Tensor:
        return self._here.buffer(bucket)

    def deliver(self, bucket: Bucket, flat: Tensor) -> None:
        self.send(bucket, flat)

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        route = self._mine
        assert route is not None, "only senders send"
        if not route.relays:
            return self._here.deliver(bucket, flat)
        began = time.monotonic()
        self._unannounced -= 1
        route.send_command(GO)
        broadcast = route.start(flat[: bucket.nbytes])
        try:
            if self._here.engines.clients:
                self._here.deliver(bucket, flat)
        except Exception:
            with contextlib.suppress(RuntimeError):  # the local error takes precedence
                broadcast.wait()
                platform.synchronize()
            raise
        broadcast.wait()
        platform.synchronize()
        self.hops.network_s += time.monotonic() - began
        self.hops.network_bytes += bucket.nbytes * len(route.relays)

    @contextlib.contextmanager
    def relaying(self) -> Iterator[None]:
        """Relays within the context. Raises the error of a relay on this rank: its node's engines lack a bucket."""
        relays = [self._relay(route) for route in self._routes if route.is_relay]
        try:
            yield
        finally:
            if self._mine is not None and self._mine.relays and self._unannounced:
                with contextlib.suppress(RuntimeError):  # its relays are gone, which their nodes report
                    self._mine.send_command(STOP)
            for relay in relays:
                relay.join(self.engines.deadline)
        self.hops = HopCosts.combine([self.hops, self._here.hops, *(relay.local.hops for relay in relays)])
        for relay in relays:
            relay.result()

    def release(self, failed: bool) -> None:
        self._unannounced = 0
        self._here.release(failed)

    def _relay(self, route: Route) -> Relay:
        """Starts to receive."""
        return Relay(route, self._topology, self._local())

    def _local(self) -> Transport:
        """Returns the transport to the current engines of this node, or to the part of an engine on this node."""
        homes, here = self._topology.homes, self._topology.nodes.mine
        clients = tuple(client for client in self.engines.clients if here in homes[client.url])
        tensor = self.engines.tensor // self._topology.nodes_per_engine
        return self._kind(Engines(clients, tensor, self.engines.deadline), self.location)


class Relay:
    """Receives a sender's buckets and delivers them, in a thread: this rank may have to contribute shards meanwhile.

    After a failed delivery this node delivers no more, but still receives all buckets, since the sender's broadcast is
    for all nodes at once.
    """

    def __init__(self, route: Route, topology: NodeTopology, local: Transport) -> None:
        self.local = local
        self._route, self._buckets = route, topology.buckets[route.sender]
        self._node = topology.nodes.mine
        self._problem: Exception | None = None
        self._discarded: Tensor | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"relay of rank {route.sender}")
        self._thread.start()

    def join(self, deadline: Deadline) -> None:
        """Blocks until the last bucket is delivered."""
        self._thread.join(deadline.left() + RELAY_GRACE_S)
        if self._thread.is_alive():
            limit = f"sync.timeout_s = {deadline.seconds:g} s and {RELAY_GRACE_S:g} s"
            self._problem = WeightError(f"buckets of rank {self._route.sender} did not arrive within {limit}")

    def result(self) -> None:
        """Raises WeightError, with this node's number, if its engines lack a bucket."""
        if self._problem is not None:
            raise WeightError(f"node {self._node}: {self._problem}") from self._problem

    def _run(self) -> None:
        try:
            platform.use_device()
            self._prepare()
            for bucket in self._buckets:
                if self._route.receive_command() == STOP:
                    return
                self._deliver(bucket)
        except Exception as error:
            self._problem = self._problem or error
        finally:
            self.local.release(failed=self._problem is not None)

    def _prepare(self) -> None:
        if self.local.engines.clients:
            try:
                self.local.prepare(self._buckets)
            except Exception as error:
                self._problem = error

    def _deliver(self, bucket: Bucket) -> None:
        wanted = bool(self.local.engines.clients) and self._problem is None
        flat = self.local.buffer(bucket) if wanted else self._scratch()
        self._route.start(flat[: bucket.nbytes]).wait()
        platform.synchronize()
        self._received(bucket, flat, wanted)

    def _received(self, bucket: Bucket, flat: Tensor, wanted: bool) -> None:
        if wanted:
            try:
                self.local.deliver(bucket, flat)
            except Exception as error:
                self._problem = error

    def _scratch(self) -> Tensor:
        """Returns a buffer for buckets that no engine here needs."""
        if self._discarded is None:
            self._discarded = torch.empty(
                largest_bucket_bytes(self._buckets), dtype=torch.uint8, device=platform.device()
            )
        return self._discarded
