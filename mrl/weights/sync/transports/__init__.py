"""Transports of weights from the trainer's senders to the engines; all of them implement `base.Transport`."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from mrl import platform
from mrl.weights.errors import WeightError
from mrl.weights.sync.payload import start_manager
from mrl.weights.sync.transports.base import RELAY_GRACE_S, Deadline, Engines, HopCosts, SenderLocation, Transport
from mrl.weights.sync.transports.cuda_ipc import CudaIpc
from mrl.weights.sync.transports.disk import Disk, make_directory
from mrl.weights.sync.transports.distributed import Distributed, own_address
from mrl.weights.sync.transports.http import Http
from mrl.weights.sync.transports.multi_node import MultiNodeTransport, NodeTopology
from mrl.weights.sync.transports.multi_node_engine import MultiNodeEngineTransport
from mrl.weights.sync.transports.shared_memory import SharedMemory

__all__ = [
    "RELAY_GRACE_S",
    "TRANSPORTS",
    "Deadline",
    "Engines",
    "HopCosts",
    "MultiNodeTransport",
    "SenderLocation",
    "SharedMemory",
    "MultiNodeEngineTransport",
    "NodeTopology",
    "Transport",
    "begin_early",
    "is_local",
    "make_directory",
    "resolve",
]

TRANSPORTS: dict[str, type[Transport]] = {
    kind.name: kind
    for kind in (
        SharedMemory,
        Http,
        Distributed,
        Disk,
        CudaIpc,
    )
}


def resolve(transport: str, colocated: bool, directory: Path | None, plain: bool = False) -> str:
    """Returns the name of the transport to use. `auto`: through memory on one machine, a process group between
    machines.

    plain: the engines support CPU tensors and files only, neither GPU memory nor process groups
    Raises WeightError for a transport that cannot reach engines on another machine.
    """
    if transport == "auto":
        if not colocated:
            return "http" if plain else "distributed"
        return "cuda_ipc" if platform.device().type == "cuda" and not plain else "shared_memory"
    kind = TRANSPORTS[transport]
    if not colocated and (kind.one_machine or (kind.needs_directory and directory is None)):
        raise WeightError(
            f"sync.transport {transport} needs the engines and all senders on one machine: use distributed or http"
        )
    return transport


def begin_early(transport: str) -> None:
    """Does the slow preparation of the transport for engines on this machine, while these start. Called on a sender."""
    if resolve(transport, True, None) == SharedMemory.name:
        with contextlib.suppress(RuntimeError):  # it may not be needed; if it is, the error is raised again
            start_manager()


def is_local(urls: Sequence[str]) -> bool:
    """Returns True if every engine runs on this machine, judged by its address."""
    return all(_address_is_ours(url) for url in urls)


def _address_is_ours(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    return ipaddress.ip_address(address).is_loopback or own_address(url) == address
