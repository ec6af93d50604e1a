"""Addresses on this machine for what this program starts: ranks that meet, engines."""

from __future__ import annotations

import random
import socket
import sys

PORTS = range(20000, 32000)  # below the range from which outgoing connections are numbered
MEETING_VARIABLE = "MRL_MEETING"  # of the ranks that `mrl train` starts: the folder where they meet, in a file
GLOO = "GLOO_SOCKET_IFNAME"
# The environment of ranks that talk to nobody but this machine: where their groups listen.
LOOPBACK = dict.fromkeys((GLOO, "NCCL_SOCKET_IFNAME"), "lo" if sys.platform == "linux" else "lo0")


class NoFreePort(RuntimeError):
    """Nothing can be started here."""


def free_port() -> int:
    """Not one from which outgoing connections are made: an engine that is started again must find its port free. Raises
    NoFreePort after 100 tries."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise NoFreePort(f"no free port on 127.0.0.1 among 100 tried between {PORTS.start} and {PORTS.stop}")


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
