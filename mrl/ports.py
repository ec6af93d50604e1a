"""Ports and addresses of this machine for rendezvous of ranks and for engines."""

from __future__ import annotations

import functools
import os
import random
import socket
import sys
from collections.abc import Collection

import psutil

PORTS = range(26000, 32000)  # slurm/run.sh uses ports from 20000; outgoing connections start at 32768
HERE = "127.0.0.1"
MEETING_VARIABLE = "MRL_MEETING"  # folder of the rendezvous file of ranks that `mrl train` starts
GLOO = "GLOO_SOCKET_IFNAME"
# Environment of ranks that communicate within this machine only: interfaces of their groups.
LOOPBACK = dict.fromkeys((GLOO, "NCCL_SOCKET_IFNAME"), "lo" if sys.platform == "linux" else "lo0")

_claims: list[socket.socket] = []  # hold the ports that `free_port` returned


class NoFreePort(RuntimeError):
    """No free port was found."""


def is_a_rank() -> bool:
    """True if the environment marks this process as a rank, as torchrun and `mrl train` do."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_problem() -> str | None:
    """Returns what is wrong with this process's rank variables in the environment; None if nothing is."""
    number, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    said = f"RANK={number} and WORLD_SIZE={size} in the environment"
    if not (number.isdecimal() and size.isdecimal() and int(number) < int(size)):
        return f"{said} do not describe a rank (0 <= RANK < WORLD_SIZE): unset both, or start this with torchrun"
    absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent and MEETING_VARIABLE not in os.environ:
        where = f"but {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not set"
        return f"{said} make this process a rank, {where}: unset both, or start this with torchrun"
    port = os.environ.get("MASTER_PORT", "1")
    return None if port.isdecimal() and int(port) < 1 << 16 else f"MASTER_PORT={port} in the environment is not a port"


def free_port(host: str = HERE, taken: Collection[int] = ()) -> int:
    """Returns a free port at that address of this machine, outside of `taken`. Raises NoFreePort after 100 tries.

    The port is outside the range of outgoing connections, since a restarted engine must find its port free. No other
    caller
    gets it while this process lives: the UDP port of the same number is held.
    """
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
    raise NoFreePort(f"no free port on {host}: tried 100 ports between {PORTS.start} and {PORTS.stop}")


def listen(host: str, port: int) -> socket.socket:
    """Listens on that address of this machine (for a name: its first address) and on no other.

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
    """Returns this machine's IPv4 address as seen by `host`; sends nothing. Raises OSError without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def default_address() -> str:
    """Returns this machine's IPv4 address on its default route; 127.0.0.1 without one."""
    try:
        return address_towards("192.0.2.1")  # documentation address (RFC 5737)
    except OSError:
        return HERE


def interface_of(host: str) -> str:
    """Returns the interface with this IPv4 address, for example "lo" or "eth0". Raises OSError if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and one.address == host for one in addresses):
            return name
    if host.startswith("127."):  # the loopback interface has all of these
        return LOOPBACK[GLOO]
    raise OSError(f"no network interface of this machine has the address {host}")


def gloo_towards(host: str) -> dict[str, str]:
    """Returns the environment that lets this machine's gloo groups listen where `host` sees them, unless it is set
    already.

    By default gloo listens at the host name's address, which Debian's /etc/hosts maps to 127.0.1.1.
    """
    try:
        return {GLOO: os.environ.get(GLOO) or interface_of(address_towards(host))}
    except OSError:
        return {}


@functools.cache
def is_here(host: str) -> bool:
    """True if `host` is an address or a name of this machine."""
    try:
        listen(host, 0).close()
    except OSError:
        return False
    return True
