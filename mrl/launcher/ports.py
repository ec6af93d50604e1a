"""Where the ranks of a world meet."""

from __future__ import annotations

import random
import socket

from mrl.launcher.logs import LaunchError

PORTS = range(20000, 32000)  # below the range from which outgoing connections are numbered


def free_port() -> int:
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no free port between {PORTS.start} and {PORTS.stop} for the ranks to meet at")
