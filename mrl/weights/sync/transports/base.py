"""Base of all transports that bring a bucket to the engines."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import cycle
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from mrl.inference.client import EngineClient
from mrl.inference.delta import LOADER, DeltaMessage
from mrl.inference.protocol import LoadFormat
from mrl.weights.sync.delta import DeltaState
from mrl.weights.sync.payload import Bucket, pickle_message

MIB = 1 << 20
RELAY_GRACE_S = 10.0  # added between ranks, so that the rank of a silent engine reports it first
MOST_AT_ONCE = 1 << 16  # calls of engines; a thread is started when all others are busy, and kept
T = TypeVar("T")


class Deadline:
    """Deadline that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def left(self) -> float:
        """Returns the seconds left, at least 0.1: a late wait still fails by itself, with its own message."""
        return max(0.1, self._end - time.monotonic())


class Engines:
    """Engines to update, from one rank's point of view. `tensor`: tensor-parallel size of each."""

    def __init__(self, clients: tuple[EngineClient, ...], tensor: int, deadline: Deadline) -> None:
        self.clients, self.tensor, self.deadline = clients, tensor, deadline
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="engines")

    def call(self, what: Callable[[EngineClient], None], timeout_s: float | None = None) -> None:
        """Calls `what(client)` for every engine in parallel. Raises the first failure after all have answered."""
        calls = self.begin(what, timeout_s)
        wait(calls)
        for call in calls:
            call.result()

    def begin(
        self,
        what: Callable[[EngineClient], None],
        timeout_s: float | None = None,
        clients: Sequence[EngineClient] | None = None,
    ) -> dict[Future[None], EngineClient]:
        """Begins to call `what(client)` for every engine, or for `clients`, all at once; returns the calls."""
        clients = self.clients if clients is None else clients
        for client in clients:
            client.timeout_s = self.deadline.left() if timeout_s is None else timeout_s
        return {self._threads.submit(what, client): client for client in clients}

    @contextmanager
    def only(self, url: str) -> Iterator[EngineClient]:
        """Restricts the engines to the one at `url` within the context."""
        everyone = self.clients
        (client,) = self.clients = tuple(c for c in everyone if c.url == url)
        try:
            yield client
        finally:
            self.clients = everyone


@dataclass
class HopCosts:
    """Cost of a sync by hop, for one rank or for all ranks.

    gather: of shards, on senders; network: from senders to other nodes; engine: from a node's rank to its engines.
    Seconds: of the slowest rank; hops overlap. bytes: total sent, over all receivers. changed, compared: elements of a
    delta sync
    """

    gather_s: float = 0.0
    network_s: float = 0.0
    network_bytes: float = 0.0
    engine_s: float = 0.0
    engine_bytes: float = 0.0
    changed: float = 0.0
    compared: float = 0.0

    @classmethod
    def combine(cls, ranks: Sequence[HopCosts]) -> HopCosts:
        """Combines the hops of all ranks, or of all concurrent parts of a rank."""
        found = cls()
        for one in fields(cls):
            values = [getattr(hops, one.name) for hops in ranks]
            setattr(found, one.name, max(values) if one.name.endswith("_s") else sum(values))
        return found


@dataclass(frozen=True)
class SenderLocation:
    """Location of this rank: its world rank, the model's device, a directory that all senders and engines can see."""

    rank: int
    device: torch.device
    directory: Path | None


class Transport(ABC):
    """Transport of one rank. A sync calls, in this order:

    `prepare` on every sender, `buffer` and, in a thread, `deliver` for each of a sender's buckets, `commit` on rank 0
    when all senders are done, `release` on every rank in any case. A bucket is filled while the previous one is
    delivered. Every failure is an exception; no call may wait longer than `engines.deadline`, plus RELAY_GRACE_S for
    other ranks.
    """

    name: ClassVar[str]
    uses_session: ClassVar[bool] = True  # call begin_weight_update first, if the engine supports sessions
    one_machine: ClassVar[bool] = False  # senders and engines have to share one
    needs_directory: ClassVar[bool] = False  # that senders and engines see: `SenderLocation.directory`
    sends_deltas: ClassVar[bool] = False  # supports sync.delta
    delta: DeltaState | None = None  # with sync.delta

    def __init__(self, engines: Engines, location: SenderLocation) -> None:
        self.engines, self.location = engines, location
        self.hops = HopCosts()  # of the current sync

    @abstractmethod
    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Prepares to send these buckets. Raises WeightError if there is no space for them, or EngineError."""

    @abstractmethod
    def buffer(self, bucket: Bucket) -> Tensor:
        """Returns uint8 [at least bucket.nbytes] for the bucket's tensors; valid until its `send` returns. Called once
        a bucket, possibly while the previous bucket is being sent.
        """

    @contextmanager
    def relaying(self) -> Iterator[None]:
        """Context around all `deliver` calls of a sync, on every rank: relays other ranks' buckets."""
        yield

    def deliver(self, bucket: Bucket, flat: Tensor) -> None:
        """Calls `send`, and counts it in `hops`. With `delta`, sends the bucket's changes if these are smaller."""
        began = time.monotonic()
        if self.delta is not None:
            self._deliver_delta(self.delta, bucket, flat)
            self.hops.network_s += time.monotonic() - began
            return
        self.send(bucket, flat)
        self.hops.engine_s += time.monotonic() - began
        self.hops.engine_bytes += bucket.nbytes * len(self.engines.clients)

    def _deliver_delta(self, delta: DeltaState, bucket: Bucket, flat: Tensor) -> None:
        message, changes = delta.changes(bucket, flat)
        if changes is None:
            self.send(bucket, flat)
        elif message.changed:
            self.send_delta(message, changes)
        if message.base is not None:
            self.hops.changed += message.changed
            self.hops.compared += -(-bucket.nbytes // message.unit)
        if changes is None or message.changed:
            self.hops.network_bytes += message.nbytes * len(self.engines.clients)
            delta.sent(bucket, flat)

    def send_delta(self, message: DeltaMessage, changes: Tensor) -> None:
        """Sends a message, and changes uint8 [m], inside requests. Blocks until every engine has applied them."""
        payloads = [pickle_message(message, changes)] * self.engines.tensor
        self.engines.call(lambda client: client.update_weights_from_tensor(payloads, load_format=LOADER))

    @abstractmethod
    def send(self, bucket: Bucket, flat: Tensor) -> None:
        """Blocks until every engine has loaded the bucket, which is in `flat` uint8 [n] from its first byte on.

        Raises WeightError or EngineError.
        """

    def commit(self, version: str) -> None:  # noqa: B027 - most transports are done when the last bucket is
        """Finishes the sync on rank 0, after every sender has sent everything."""

    def release(self, failed: bool) -> None:  # noqa: B027 - not all take something
        """Releases the resources of `prepare`."""

    def forget(self, client: EngineClient) -> None:  # noqa: B027 - most share nothing with an engine between syncs
        """Forgets an engine that is a new process."""

    def close(self) -> None:
        """Releases everything after the last sync."""
        self.release(failed=False)


class HandleTransport(Transport):
    """Transport by handles: a bucket stays in this node's memory, and requests carry handles that are valid on this
    node only.
    """

    one_machine = True
    load_format: ClassVar[LoadFormat | None] = None  # format of a handle's content

    @abstractmethod
    def handles(self, bucket: Bucket, flat: Tensor) -> list[str]:
        """Returns handles of the bucket in `flat` uint8 [n], one for each of the `engines.tensor` processes of one
        engine.
        """

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        def update(client: EngineClient) -> None:
            client.update_weights_from_tensor(self.handles(bucket, flat), load_format=self.load_format)

        self.engines.call(update)


def double_buffer(make: Callable[[], T], buckets: Sequence[Bucket]) -> Iterator[T]:
    """Cycles over two buffers, one filled while the other is sent; over one buffer for a single bucket."""
    return cycle([make() for _ in buckets[:2]])


def largest_bucket_bytes(buckets: Sequence[Bucket]) -> int:
    return max((bucket.nbytes for bucket in buckets), default=0)
