"""Addresses on this machine for what this program starts: ranks that meet, engines."""

from __future__ import annotations

import random
import socket

PORTS = range(20000, 32000)  # below the range from which outgoing connections are numbered


class NoFreePort(RuntimeError):
    """Nothing can be started here."""


def free_port() -> int:
    """Not one from which outgoing connections are made: an engine that is started again must find its port free."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise NoFreePort(f"no free port on 127.0.0.1 among 100 tried between {PORTS.start} and {PORTS.stop}")
