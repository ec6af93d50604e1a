"""What every way of bringing a bucket to the engines has in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import cycle
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from mrl.rollout.client import EngineClient
from mrl.rollout.protocol import LoadFormat
from mrl.weights.sync.payload import Bucket

MIB = 1 << 20
RELAY_GRACE_S = 10.0  # ranks wait longer for each other than for engines: whose engine is silent says so first
T = TypeVar("T")


class Deadline:
    """A budget of seconds that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def left(self) -> float:
        """Seconds left, at least 0.1: a wait that starts too late still fails by itself, with its own message."""
        return max(0.1, self._end - time.monotonic())


@dataclass
class Engines:
    """The engines to update, from one rank's point of view. `tensor`: tensor-parallel size of each."""

    clients: tuple[EngineClient, ...]
    tensor: int
    deadline: Deadline

    def call(self, what: Callable[[EngineClient], None], timeout_s: float | None = None) -> None:
        """`what(client)` for every engine at once. Raises the first failure after all have answered."""
        for client in self.clients:
            client.timeout_s = self.deadline.left() if timeout_s is None else timeout_s
        if len(self.clients) == 1:
            what(self.clients[0])
            return
        with ThreadPoolExecutor(len(self.clients)) as pool:
            futures = [pool.submit(what, client) for client in self.clients]
        for future in futures:
            future.result()

    @contextmanager
    def only(self, url: str) -> Iterator[EngineClient]:
        """Meanwhile the engine at `url` is the only one."""
        everyone = self.clients
        (client,) = self.clients = tuple(c for c in everyone if c.url == url)
        try:
            yield client
        finally:
            self.clients = everyone


@dataclass
class Hops:
    """What a push has cost, hop by hop: one rank's, or all ranks'.

    gather: of shards, on senders; network: from senders to other nodes; engine: from a node's rank to its engines.
    Seconds: of the rank that needed longest; hops overlap. bytes: what was sent, over all receivers.
    """

    gather_s: float = 0.0
    network_s: float = 0.0
    network_bytes: float = 0.0
    engine_s: float = 0.0
    engine_bytes: float = 0.0

    @classmethod
    def of_all(cls, ranks: Sequence[Hops]) -> Hops:
        """Of all ranks, or of all of a rank's parts that run at once."""
        found = cls()
        for one in fields(cls):
            values = [getattr(hops, one.name) for hops in ranks]
            setattr(found, one.name, max(values) if one.name.endswith("_s") else sum(values))
        return found


@dataclass(frozen=True)
class Place:
    """Where this rank stands: its world rank, the model's device, a directory that all senders and engines can see."""

    rank: int
    device: torch.device
    directory: Path | None


class Transport(ABC):
    """One rank's end of a way to the engines. A push calls, in this order:

    `prepare` on every sender, `buffer` and, in a thread, `deliver` for each of a sender's buckets, `commit` on rank 0
    when all senders are done, `release` on every rank whatever happened. A bucket is filled while the one before it is
    delivered. Every failure is an exception; none of them may wait longer than `engines.deadline`, but for other ranks
    RELAY_GRACE_S more.
    """

    name: ClassVar[str]
    uses_session: ClassVar[bool] = True  # the engine wants begin_weight_update around it, where it knows sessions
    one_machine: ClassVar[bool] = False  # senders and engines have to share one
    needs_directory: ClassVar[bool] = False  # that senders and engines see: `Place.directory`

    def __init__(self, engines: Engines, place: Place) -> None:
        self.engines, self.place = engines, place
        self.hops = Hops()  # of the present push

    @abstractmethod
    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Get ready to send these. Raises WeightError where there is no room for them, or EngineError."""

    @abstractmethod
    def buffer(self, bucket: Bucket) -> Tensor:
        """uint8 [at least bucket.nbytes], which the bucket's tensors are to be written into; valid until its `send`
        returns. Asked once a bucket, while the one before it may be on its way."""

    @contextmanager
    def relaying(self) -> Iterator[None]:
        """Around all of a push's `deliver`, on every rank: what a rank does meanwhile for other ranks' buckets."""
        yield

    def deliver(self, bucket: Bucket, flat: Tensor) -> None:
        """`send`, counted in `hops`."""
        began = time.monotonic()
        self.send(bucket, flat)
        self.hops.engine_s += time.monotonic() - began
        self.hops.engine_bytes += bucket.nbytes * len(self.engines.clients)

    @abstractmethod
    def send(self, bucket: Bucket, flat: Tensor) -> None:
        """Returns when every engine has loaded the bucket, which is in `flat` uint8 [n] from its first byte on.

        Raises WeightError or EngineError.
        """

    def commit(self, version: str) -> None:  # noqa: B027 - most transports are done when the last bucket is
        """Rank 0, after every sender has sent everything."""

    def release(self, failed: bool) -> None:  # noqa: B027 - not all take something
        """Give back what `prepare` took."""

    def forget(self, client: EngineClient) -> None:  # noqa: B027 - most share nothing with an engine between pushes
        """The engine is a new process."""

    def close(self) -> None:
        """The last push is over."""
        self.release(failed=False)


class ByHandle(Transport):
    """A bucket stays in the memory of this node, and a request carries handles of it: good here and nowhere else."""

    one_machine = True
    load_format: ClassVar[LoadFormat | None] = None  # of what a handle stands for

    @abstractmethod
    def handles(self, bucket: Bucket, flat: Tensor) -> list[str]:
        """Of the bucket in `flat` uint8 [n], for the `engines.tensor` processes of one engine, each for one of them."""

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        def update(client: EngineClient) -> None:
            client.update_weights_from_tensor(self.handles(bucket, flat), load_format=self.load_format)

        self.engines.call(update)


def by_turns(make: Callable[[], T], buckets: Sequence[Bucket]) -> Iterator[T]:
    """Two, in turns without end, one to be filled while the other is sent; of a single bucket one."""
    return cycle([make() for _ in buckets[:2]])


def largest(buckets: Sequence[Bucket]) -> int:
    return max((bucket.nbytes for bucket in buckets), default=0)
