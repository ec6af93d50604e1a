"""Addresses on this machine for what this program starts: ranks that meet, engines."""

from __future__ import annotations

import functools
import os
import random
import socket
import sys
from collections.abc import Collection

import psutil

PORTS = range(26000, 32000)  # of slurm/run.sh are those from 20000; from 32768 outgoing connections are numbered
HERE = "127.0.0.1"
MEETING_VARIABLE = "MRL_MEETING"  # of the ranks that `mrl train` starts: the folder where they meet, in a file
GLOO = "GLOO_SOCKET_IFNAME"
# The environment of ranks that talk to nobody but this machine: where their groups listen.
LOOPBACK = dict.fromkeys((GLOO, "NCCL_SOCKET_IFNAME"), "lo" if sys.platform == "linux" else "lo0")

_claims: list[socket.socket] = []  # on the ports that `free_port` has given


class NoFreePort(RuntimeError):
    """Nothing can be started here."""


def is_a_rank() -> bool:
    """Whether the environment says so, as torchrun's and `mrl train`'s does."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_problem() -> str | None:
    """What is wrong with the place that the environment gives this process in a world; None if nothing is."""
    number, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    said = f"RANK={number} and WORLD_SIZE={size} in the environment"
    if not (number.isdecimal() and size.isdecimal() and int(number) < int(size)):
        return f"{said} are no rank of a world: unset both, or start this by torchrun"
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent and MEETING_VARIABLE not in os.environ:
        where = f"but not {' and '.join(absent)}, where it meets"
        return f"{said} make this a rank of a world, {where}: unset both, or start this by torchrun"
    port = os.environ.get("MASTER_PORT", "1")
    return None if port.isdecimal() and int(port) < 1 << 16 else f"MASTER_PORT={port} in the environment is no port"


def free_port(host: str = HERE, taken: Collection[int] = ()) -> int:
    """At that address of this machine, and none of `taken`, where somebody will listen. Not one from which outgoing
    connections are made: an engine that is started again must find its port free. Nobody else who asks here gets it
    while this process lives: its UDP namesake is held. Raises NoFreePort after 100 tries."""
    for port in random.SystemRandom().sample([port for port in PORTS if port not in taken], 100):
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            claim.bind((host, port))
            with socket.socket() as probe:
                probe.bind((host, port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
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


def gloo_towards(host: str) -> dict[str, str]:
    """The environment in which gloo's groups of this machine listen where `host` sees it, unless that is said already.
    By themselves they do at this machine's name, which Debian's /etc/hosts has at 127.0.1.1."""
    try:
        return {GLOO: os.environ.get(GLOO) or interface_of(address_towards(host))}
    except OSError:
        return {}


@functools.cache
def is_here(host: str) -> bool:
    """Whether it is an address, or a name, of this machine."""
    try:
        listen(host, 0).close()
    except OSError:
        return False
    return True
