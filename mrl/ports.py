"""Addresses on this machine for what this program starts: ranks that meet, engines."""

from __future__ import annotations

import functools
import random
import socket
import sys
from collections.abc import Collection

import psutil

PORTS = range(20000, 32000)  # below the range from which outgoing connections are numbered
HERE = "127.0.0.1"
MEETING_VARIABLE = "MRL_MEETING"  # of the ranks that `mrl train` starts: the folder where they meet, in a file
GLOO = "GLOO_SOCKET_IFNAME"
# The environment of ranks that talk to nobody but this machine: where their groups listen.
LOOPBACK = dict.fromkeys((GLOO, "NCCL_SOCKET_IFNAME"), "lo" if sys.platform == "linux" else "lo0")


class NoFreePort(RuntimeError):
    """Nothing can be started here."""


def free_port(host: str = HERE, taken: Collection[int] = ()) -> int:
    """At that address of this machine, and none of `taken`, where somebody will listen. Not one from which outgoing
    connections are made: an engine that is started again must find its port free. Raises NoFreePort after 100 tries."""
    for port in random.SystemRandom().sample([port for port in PORTS if port not in taken], 100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise NoFreePort(f"no free port on {host} among 100 tried between {PORTS.start} and {PORTS.stop}")


def listen(host: str, port: int) -> socket.socket:
    """Listens on that address of this machine (a name: the first that it stands for) and on no other.

    Raises OSError if the address is not this machine's, or the port is taken.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def address_towards(host: str) -> str:
    """This machine's IPv4 address as `host` sees it; nothing is sent. Raises OSError where there is no way there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_of(host: str) -> str:
    """The name of the interface that has this IPv4 address, such as "lo" or "eth0". Raises OSError if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == host for one in addresses):
            return name
    if host.startswith("127."):  # all of them are the loopback's
        return LOOPBACK[GLOO]
    raise OSError(f"no interface of this machine has the address {host}")


@functools.cache
def is_here(host: str) -> bool:
    """Whether it is an address, or a name, of this machine."""
    try:
        listen(host, 0).close()
    except OSError:
        return False
    return True
