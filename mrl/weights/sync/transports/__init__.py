"""Ways to bring weights from the trainer's senders to the engines; all of them do what `base.Transport` says."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from mrl import platform
from mrl.weights.errors import WeightError
from mrl.weights.sync.transports.base import Deadline, Engines, Place, Transport
from mrl.weights.sync.transports.cuda_ipc import CudaIpc
from mrl.weights.sync.transports.disk import Disk, make_directory
from mrl.weights.sync.transports.distributed import Distributed, own_address
from mrl.weights.sync.transports.http import Http
from mrl.weights.sync.transports.shared_memory import SharedMemory

__all__ = ["Deadline", "Engines", "Place", "Transport", "build", "is_local", "make_directory", "resolve"]

SAME_MACHINE = ("shared_memory", "cuda_ipc")

_BUILDERS: dict[str, Callable[[Engines, Place], Transport]] = {
    "shared_memory": SharedMemory,
    "http": Http,
    "distributed": lambda engines, place: Distributed(engines, place, platform.backend()),
    "disk": Disk,
    "cuda_ipc": CudaIpc,
}


def resolve(transport: str, colocated: bool, directory: Path | None, plain: bool = False) -> str:
    """`auto`: through memory on one machine, over a process group between machines.

    plain: the engines know CPU tensors and files only, neither GPU memory nor process groups
    Raises WeightError for a transport that cannot reach engines on another machine.
    """
    if transport == "auto":
        if not colocated:
            return "http" if plain else "distributed"
        return "cuda_ipc" if platform.device().type == "cuda" and not plain else "shared_memory"
    if not colocated and (transport in SAME_MACHINE or (transport == "disk" and directory is None)):
        raise WeightError(
            f"sync.transport {transport} needs the engines and all senders on one machine: use distributed or http"
        )
    return transport


def build(transport: str, engines: Engines, place: Place) -> Transport:
    return _BUILDERS[transport](engines, place)


def is_local(urls: Sequence[str]) -> bool:
    """Whether every engine runs on this machine: its address is one of our own."""
    return all(_address_is_ours(url) for url in urls)


def _address_is_ours(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    return ipaddress.ip_address(address).is_loopback or own_address(url) == address
