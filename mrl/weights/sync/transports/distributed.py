"""Transport by broadcasts over one process group of a sender and all engines' processes: gloo, or nccl between GPUs.

A broadcast is a tree: the sender sends a bucket once (nccl), or log2 of the number of receivers (gloo).

Every sender, one a pipeline stage, has a group of its own. Two senders must not broadcast at the same time: engine A
could be inside the first one's broadcast and engine B inside the second one's, each waiting for the other. Hence
senders take turns (`Turns`, a lock across ranks), in the order in which their buckets are full. A fixed order of the
senders could deadlock too, since filling a bucket may need the shards of a sender that waits for its turn.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform
from mrl.inference.client import EngineClient
from mrl.inference.delta import LOADER, DeltaMessage
from mrl.inference.errors import EngineError
from mrl.parallel import world_size
from mrl.weights.errors import WeightError
from mrl.weights.sync.payload import Bucket, pickle_message
from mrl.weights.sync.transports.background import InBackground
from mrl.weights.sync.transports.base import (
    Deadline,
    Engines,
    SenderLocation,
    Transport,
    double_buffer,
    largest_bucket_bytes,
)

CLEANUP_TIMEOUT_S = 5.0
LEAVING_S = 1.0  # until a broadcast that the engines have left ends; NCCL's may not
POLL_S = 0.005
OWN_FAILURE_POLL_S = 0.1


@dataclass
class _Joined:
    """Process group with engines, and the last broadcast in it. store: holds the group's keys; `None` group: joining"""

    name: str
    clients: tuple[EngineClient, ...]
    store: dist.TCPStore | None = None
    group: Any = None
    broadcast: InBackground | None = None


class Distributed(Transport):
    """The group is joined in the first sync and kept. After a failed sync, or for other engines than before, the next
    sync joins a new group.

    An engine receives only after it has accepted the request, and NCCL's first broadcast returns only when all members
    are in it, since it connects them. Requests and broadcast therefore run at the same time. A refused request abandons
    the broadcast, and with it the group. Engines inside a gloo broadcast are free again when the other members have
    left; inside an NCCL broadcast they wait until NCCL's own time-out.
    """

    name = "distributed"
    sends_deltas = True

    def __init__(self, engines: Engines, location: SenderLocation) -> None:
        super().__init__(engines, location)
        self._backend = platform.backend()
        self._device = location.device if self._backend == "nccl" else torch.device("cpu")
        self._joined: _Joined | None = None
        self._abandoned: list[_Joined] = []
        self._flats: Iterator[Tensor] = iter(())
        self._generation = 0
        self._turns = Turns()

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        size = largest_bucket_bytes(buckets)
        self._flats = double_buffer(lambda: torch.empty(size, dtype=torch.uint8, device=self._device), buckets)
        self._generation += 1
        if self._joined is None or self._joined.clients != self.engines.clients:
            self._leave()
            with self._turns.take(self.engines.deadline), self._leaving_on_failure():
                self._join()

    def buffer(self, bucket: Bucket) -> Tensor:
        return next(self._flats)

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        def ask(client: EngineClient, group: str) -> None:
            client.update_weights_from_distributed(
                names=[slot.name for slot in bucket.slots],
                dtypes=[str(slot.dtype).removeprefix("torch.") for slot in bucket.slots],
                shapes=[slot.shape for slot in bucket.slots],
                group_name=group,
                load_format="flattened_bucket",
            )

        self._broadcast(flat[: bucket.nbytes], ask)

    def send_delta(self, message: DeltaMessage, changes: Tensor) -> None:
        """Broadcasts the changes of a bucket; the engines' loader receives them. Other messages have none."""
        if message.step != "bucket":
            return super().send_delta(message, changes)

        def ask(client: EngineClient, group: str) -> None:
            payload = pickle_message(replace(message, group=group), changes[:0])
            client.update_weights_from_tensor([payload] * self.engines.tensor, load_format=LOADER)

        self._broadcast(changes, ask)

    def release(self, failed: bool) -> None:
        self._flats = iter(())
        if failed:
            self._leave()

    def forget(self, client: EngineClient) -> None:
        if self._joined is not None:  # the next sync sees that others are in the group than it needs
            self._joined.clients = tuple(member for member in self._joined.clients if member is not client)

    def close(self) -> None:
        super().close()
        self._leave()

    def _broadcast(self, part: Tensor, ask: Callable[[EngineClient, str], None]) -> None:
        """Broadcasts `part` uint8 [n]. ask: makes an engine receive it in the group of this name"""
        with self._turns.take(self.engines.deadline), self._leaving_on_failure():
            joined = self._joined
            assert joined is not None, "joined by prepare()"
            left = timedelta(seconds=self.engines.deadline.left())
            replies = self.engines.begin(lambda client: ask(client, joined.name))
            joined.broadcast = InBackground(lambda: _broadcast(joined.group, part, left))
            self._finish(replies, joined.broadcast, f"the broadcast to {_named(joined.clients)}")

    def _finish(self, replies: Mapping[Future[None], EngineClient], own: InBackground, what: str) -> None:
        """Blocks until all engines have replied and this rank's part is done. Raises the errors of the engines at
        fault: of those that do not answer, if there are any, since the others may only have lost contact with these.
        """
        pending = set(replies)
        while pending and not own.failed and not _errors(replies):
            pending = wait(pending, OWN_FAILURE_POLL_S, FIRST_EXCEPTION).not_done
        if own.failed and not _errors(replies):
            wait(pending, CLEANUP_TIMEOUT_S, FIRST_EXCEPTION)  # a reply describes a dead engine better
        first = _errors(replies)
        if first and not any(map(_is_silent, first)):
            wait(pending, LEAVING_S)
        if errors := list(filter(_is_silent, _errors(replies))) or first:
            raise errors[0] if len(errors) == 1 else WeightError("; ".join(map(str, errors)))
        if not own.wait(self.engines.deadline.left()):
            raise WeightError(f"{what} did not end within {self.engines.deadline.seconds:g} s")
        try:
            own.result(0, what)
        except RuntimeError as error:
            raise WeightError(f"{what} failed: {error}") from error

    @contextlib.contextmanager
    def _leaving_on_failure(self) -> Iterator[None]:
        """Leaves the group within this sender's turn: the next sender needs the engines that are still inside."""
        try:
            yield
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        """Makes the engines leave the group, which also ends a broadcast without receiver."""
        joined, self._joined = self._joined, None
        if joined is None:
            return

        def ask(client: EngineClient) -> None:
            with contextlib.suppress(EngineError):  # it is gone, or still inside the broadcast
                client.destroy_weights_update_group(joined.name)

        replies = self.engines.begin(ask, CLEANUP_TIMEOUT_S, joined.clients)
        joined.store = None  # ends a rendezvous
        if joined.broadcast is None or joined.broadcast.wait(LEAVING_S):
            joined.group = None  # closes this rank's connections, which frees engines that wait for it
        else:
            self._abandoned.append(joined)  # destroying the group would wait for the broadcast
        wait(replies)

    # ---- joining

    def _join(self) -> None:
        """Joins as rank 0 a new group whose other ranks are the engines' processes."""
        clients, tensor = self.engines.clients, self.engines.tensor
        timeout = timedelta(seconds=self.engines.deadline.left())
        address, size = _address_for(clients), 1 + tensor * len(clients)
        self._joined = joined = _Joined(f"mrl-sync-{self.location.rank}-{self._generation}", clients)
        joined.store = _store_at(address, timeout)
        port, empty = joined.store.port, joined.store.num_keys()

        def ask(client: EngineClient) -> None:
            client.init_weights_update_group(
                master_address=address,
                master_port=port,
                rank_offset=1 + tensor * clients.index(client),
                world_size=size,
                group_name=joined.name,
                backend=self._backend,
            )

        def rendezvous() -> None:
            store = dist.TCPStore(address, port, wait_for_workers=False, timeout=timeout)
            joined.group = self._rendezvous(store, joined.name, size, timeout, address)

        replies = self.engines.begin(ask)
        while joined.store.num_keys() == empty and not _errors(replies):
            answered = [client for reply, client in replies.items() if reply.done() and reply.exception() is None]
            if answered and joined.store.num_keys() == empty:
                what = f"engine {_named(answered)} joining process group {joined.name}"
                raise WeightError(f"{what}: it responded, but did not join")
            time.sleep(POLL_S)
        self._finish(replies, InBackground(rendezvous), f"joining process group {joined.name}")

    def _rendezvous(self, store: dist.Store, name: str, size: int, timeout: timedelta, address: str) -> Any:
        """Creates our side of the group that the engines make with torch's helper: same backend, same keys in the
        store.

        gloo listens at this address only; nccl uses its own address, of the interface NCCL_SOCKET_IFNAME.
        """
        keys = dist.PrefixStore(f"{self._device.type}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        if self._backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            return dist.ProcessGroupGloo(keys, 0, size, options)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(keys, 0, size, nccl)


class Turns:
    """Lock across the ranks of the world, in its store; granted in the order of the requests."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        if world_size() > 1:
            self._store = dist.PrefixStore("mrl-sync-turns", dist.distributed_c10d._get_default_store())

    @contextlib.contextmanager
    def take(self, deadline: Deadline) -> Iterator[None]:
        """Waits for this rank's turn, which ends with the context. Raises WeightError after the deadline."""
        if self._store is None:
            yield
            return
        ticket = self._store.add("tickets", 1)
        try:
            while ticket > 1 and not self._store.check([str(ticket)]):
                if deadline.is_over:
                    raise WeightError(f"another sender's broadcast did not end within {deadline.seconds:g} s")
                time.sleep(POLL_S)
            self._store.delete_key(str(ticket))
            yield
        finally:
            self._store.set(str(ticket + 1), "")


def _errors(replies: Mapping[Future[None], EngineClient]) -> list[BaseException]:
    return [error for reply in replies if reply.done() and (error := reply.exception()) is not None]


def _is_silent(error: BaseException) -> bool:
    """True if an engine did not answer at all."""
    return isinstance(error, EngineError) and error.status is None


def _named(clients: Sequence[EngineClient]) -> str:
    return ", ".join(client.url for client in clients)


def _address_for(clients: Sequence[EngineClient]) -> str:
    """Returns this machine's address as the engines see it; not the loopback one if an engine is elsewhere."""
    addresses = [own_address(client.url) for client in clients]
    return min(addresses, key=lambda address: ipaddress.ip_address(address).is_loopback)


def _store_at(address: str, timeout: timedelta) -> dist.TCPStore:
    """Returns a store that listens at this address only: by default a TCPStore listens on all addresses."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _broadcast(group: Any, flat: Tensor, timeout: timedelta) -> None:
    """Blocks until `flat` may be written again."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.asyncOp = True
    group.broadcast([flat], options).wait(timeout)
    platform.synchronize()


def own_address(url: str) -> str:
    """Returns this machine's address as the engine at `url` sees it. Raises WeightError if the engine is
    unreachable.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((host, port), timeout=CLEANUP_TIMEOUT_S) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise WeightError(f"engine {url} cannot be reached: {error}") from error
