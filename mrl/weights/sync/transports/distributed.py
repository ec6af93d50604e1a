"""Transport by broadcasts over a process group of the sender and one engine's processes: gloo, or nccl between GPUs.

Each (sender, engine) pair has its own group. With one group over several engines, two concurrent senders could
deadlock: engine A inside the first one's broadcast, engine B inside the second one's.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform
from mrl.rollout.client import EngineClient
from mrl.rollout.errors import EngineError
from mrl.weights.errors import WeightError
from mrl.weights.sync.payload import Bucket
from mrl.weights.sync.transports.background import InBackground
from mrl.weights.sync.transports.base import Engines, SenderLocation, Transport, double_buffer, largest_bucket_bytes

CLEANUP_TIMEOUT_S = 5.0
LEAVING_S = 1.0  # until a broadcast that the engine has left ends; NCCL's may not
POLL_S = 0.005


@dataclass
class _Joined:
    """Process group with an engine, and the last broadcast in it."""

    name: str
    group: Any
    broadcast: InBackground | None = None


class Distributed(Transport):
    """Groups are joined in the first sync and kept; a failed sync drops them, and the next one joins new groups.

    The engine receives only after it has accepted the request, and NCCL's first broadcast returns only when both sides
    are in it, since it connects them. Request and broadcast therefore run in a thread each. A refused request abandons
    the broadcast, and with it the group.
    """

    name = "distributed"

    def __init__(self, engines: Engines, location: SenderLocation) -> None:
        super().__init__(engines, location)
        self._backend = platform.backend()
        self._device = location.device if self._backend == "nccl" else torch.device("cpu")
        self._groups: dict[EngineClient, _Joined] = {}
        self._abandoned: list[_Joined] = []
        self._flats: Iterator[Tensor] = iter(())
        self._generation = 0

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        size = largest_bucket_bytes(buckets)
        self._flats = double_buffer(lambda: torch.empty(size, dtype=torch.uint8, device=self._device), buckets)
        self._generation += 1
        self.engines.call(self._join)

    def buffer(self, bucket: Bucket) -> Tensor:
        return next(self._flats)

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        part = flat[: bucket.nbytes]
        self.engines.call(lambda client: self._deliver(client, bucket, part))

    def _deliver(self, client: EngineClient, bucket: Bucket, part: Tensor) -> None:
        joined = self._groups[client]

        def ask() -> None:
            client.update_weights_from_distributed(
                names=[slot.name for slot in bucket.slots],
                dtypes=[str(slot.dtype).removeprefix("torch.") for slot in bucket.slots],
                shapes=[slot.shape for slot in bucket.slots],
                group_name=joined.name,
                load_format="flattened_bucket",
            )

        left = timedelta(seconds=self.engines.deadline.left())
        reply = InBackground(ask)
        joined.broadcast = broadcast = InBackground(lambda: _broadcast(joined.group, part, left))
        while not reply.wait(POLL_S):
            if broadcast.failed:
                reply.wait(CLEANUP_TIMEOUT_S)  # the request's own error describes a dead engine better
                break
        what = f"engine {client.url}: the broadcast to it"
        if reply.done:
            reply.result(0, what)
        if broadcast.wait(self.engines.deadline.left()):
            try:
                broadcast.result(0, what)
            except RuntimeError as error:
                raise WeightError(f"{what} failed: {error}") from error
        else:
            raise WeightError(f"{what} did not end within {self.engines.deadline.seconds:g} s")

    def release(self, failed: bool) -> None:
        self._flats = iter(())
        if failed:
            self._leave()

    def forget(self, client: EngineClient) -> None:
        if client in self._groups:
            self._abandoned.append(self._groups.pop(client))

    def close(self) -> None:
        super().close()
        self._leave()

    def _leave(self) -> None:
        """Makes the engines leave the groups, which also ends a broadcast without receiver."""
        groups, self._groups = self._groups, {}
        for client, joined in groups.items():
            client.timeout_s = CLEANUP_TIMEOUT_S
            try:
                client.destroy_weights_update_group(joined.name)
            except EngineError:
                self._abandoned.append(joined)  # destroying it would wait for its unfinished broadcast
                continue
            if joined.broadcast is not None and not joined.broadcast.wait(LEAVING_S):
                self._abandoned.append(joined)

    def _join(self, client: EngineClient) -> None:
        """Joins as rank 0 a new group whose other ranks are the engine's processes, unless there is one already."""
        if client in self._groups:
            return
        timeout = timedelta(seconds=self.engines.deadline.left())
        address = own_address(client.url)
        size = 1 + self.engines.tensor
        name = f"mrl-sync-{self.location.rank}-{self._generation}"
        store = _store_at(address, timeout)
        empty = store.num_keys()
        reply = InBackground(
            lambda: client.init_weights_update_group(
                master_address=address,
                master_port=store.port,
                rank_offset=1,
                world_size=size,
                group_name=name,
                backend=self._backend,
            )
        )
        what = f"engine {client.url} joining process group {name}"
        self._await_first_key(store, empty, reply, what)
        group = self._rendezvous(store, name, size, timeout, address)
        reply.result(self.engines.deadline.left(), what)
        self._groups[client] = _Joined(name, group)

    def _await_first_key(self, store: dist.TCPStore, empty: int, reply: InBackground, what: str) -> None:
        """Blocks until the engine has written to the store: only then is it safe to enter the blocking rendezvous."""
        while store.num_keys() == empty:
            if reply.done and store.num_keys() == empty:
                reply.result(0, what)
                raise WeightError(f"{what}: it responded, but did not join")
            if self.engines.deadline.is_over:
                raise WeightError(f"{what}: did not join within {self.engines.deadline.seconds:g} s")
            time.sleep(POLL_S)

    def _rendezvous(self, store: dist.Store, name: str, size: int, timeout: timedelta, address: str) -> Any:
        """Creates our side of the group that the engine makes with torch's helper: same backend, same keys in the
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
