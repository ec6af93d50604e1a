"""Handle on one worker process, used by the pool's own thread only."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mrl.reward.errors import SampleError
from mrl.reward.plan import Component
from mrl.reward.score_requests import Outcome, set_outcome

STARTUP_TIMEOUT_S = 120.0
SOCKET_TIMEOUT_S = 10  # for a message in transit; only a stopped process takes so long
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass
class Job:
    """One call of a component's function: with one sample, or as a batch with all of `futures`."""

    component: Component
    labels: list[str]  # "sample 3 (row 103, prompt '31542=')"
    payload: bytes
    futures: list[Future[Outcome]]

    def fail(self, reason: str, place: int | None = None, error: type[SampleError] = SampleError) -> None:
        """Fails the whole job, or only the sample at `place` of it."""
        places = range(len(self.futures)) if place is None else [place]
        for i in places:
            what = f"reward function {self.component.spec!r} on {self._who(place)} {reason}"
            set_outcome(self.futures[i], error(what))

    def _who(self, place: int | None) -> str:
        if place is not None or len(self.labels) == 1:
            return self.labels[place or 0]
        return f"a batch of {len(self.labels)} samples, the first of them {self.labels[0]},"


@dataclass
class Worker:
    """A child process that answers jobs in order; `jobs` are its jobs, of which the first is being processed."""

    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    jobs: deque[Job] = field(default_factory=deque)
    since: float = field(default_factory=time.monotonic)  # start time of the current job (or of the process)

    @staticmethod
    def start(setup: dict[str, Any]) -> Worker:
        """Starts a worker with `setup` (see `mrl.reward.worker`), in its own session: the trainer handles Ctrl-C. The
        worker reports ready by itself.

        The calling thread must live as long as the worker: the kernel kills the child when that thread ends.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            limit = struct.pack("ll", SOCKET_TIMEOUT_S, 0)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mrl.reward.worker", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,
            )
        worker = Worker(process, Connection(ours.detach()))
        worker._send({"sys_path": sys.path, **setup})
        return worker

    def send_jobs(self, jobs: list[Job]) -> bool:
        """Sends jobs to the worker; returns False, with nothing taken, if the worker no longer reads."""
        if not self._send([job.payload for job in jobs]):
            return False
        self.jobs.extend(jobs)
        self.since = time.monotonic()
        return True

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Returns all messages that have arrived, and False if no more can come (the worker is dead or sends invalid
        data).
        """
        messages: list[dict[str, Any]] = []
        try:
            while self.connection.poll():
                messages.append(json.loads(self.connection.recv_bytes()))
        except (EOFError, OSError, ValueError):
            return messages, False
        return messages, True

    def deadline(self, timeout_s: float) -> float | None:
        """Returns the deadline of the current job (time.monotonic); None if the worker is idle."""
        if not self.ready:
            return self.since + STARTUP_TIMEOUT_S
        return self.since + timeout_s if self.jobs else None

    def kill(self) -> str:
        """Kills the worker and its children, reaps it, and says how it ended: "exit code 3" or "signal SIGSEGV"."""
        self.connection.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # does not change how a dead, unreaped process ended
        except ProcessLookupError:
            pass
        code = self.process.wait(SOCKET_TIMEOUT_S)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _send(self, message: object) -> bool:
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([_PACKAGE_ROOT, path] if path else [_PACKAGE_ROOT]),
    }
