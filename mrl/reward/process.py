"""Handle on one worker process, used by the pool's own thread only."""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mrl.reward.errors import SampleError
from mrl.reward.plan import Component
from mrl.reward.score_requests import Outcome, set_outcome
from mrl.worker_process import STARTUP_TIMEOUT_S, WorkerProcess


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


class Worker(WorkerProcess):
    """A child process that answers jobs in order, and reports ready by itself.

    setup: see `mrl.reward.worker`. The calling thread must live as long as the worker: the kernel kills the child when
    that thread ends.
    ready: the functions are loaded; jobs: sent to it, of which the first is being processed; since: start time of that
    one (time.monotonic), or of the process
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__("mrl.reward.worker")
        self.ready, self.jobs, self.since = False, deque[Job](), time.monotonic()
        self._send({"sys_path": sys.path, **setup})

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

    def _send(self, message: object) -> bool:
        try:
            self.connection.send(message)
        except OSError:
            return False
        return True
