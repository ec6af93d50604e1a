"""A child process that exchanges messages with this one over a socket: reward functions and agents' programs run so."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

STARTUP_TIMEOUT_S = 120.0
SOCKET_TIMEOUT_S = 10  # for a message in transit; only a stopped process takes so long
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])


class WorkerProcess:
    """Runs `python -m MODULE FD PARENT_PID` in its own session, so that the trainer alone handles Ctrl-C.

    connection: this process's end of the socket FD
    """

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            limit = struct.pack("ll", SOCKET_TIMEOUT_S, 0)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    def kill(self) -> str:
        """Kills the process and its children, reaps it, and says how it ended: "exit code 3" or "signal SIGSEGV"."""
        self.connection.close()
        if self.process.returncode is None:  # otherwise its number may be another process's
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # does not change how a dead, unreaped process ended
        code = self.process.wait(SOCKET_TIMEOUT_S)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    root = os.pathsep.join([_PACKAGE_ROOT, path] if path else [_PACKAGE_ROOT])
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": root}
