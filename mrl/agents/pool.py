"""The worker processes that agents' programs run in, as rank 0 has them."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mrl import strict_json
from mrl.agents.errors import AgentError

STARTUP_TIMEOUT_S = 120.0
SOCKET_TIMEOUT_S = 10  # of one message under way; only a stopped process takes so long
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])

LATE = "or another one in its process was not done in time (agent.trajectory_timeout_s)"

Message = dict[str, Any]


class Worker:
    """One process. setup: as `mrl.agents.worker` gets it. Raises AgentError if it does not come up."""

    def __init__(self, setup: Message) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            limit = struct.pack("ll", SOCKET_TIMEOUT_S, 0)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mrl.agents.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())
        self.send({"sys_path": sys.path, **setup})

    def wait_ready(self) -> None:
        message = self.receive() if self.connection.poll(STARTUP_TIMEOUT_S) else {}
        if "ready" not in message:
            ended = f"its process ended ({self.kill()}) or hangs while importing the file"
            raise AgentError(message.get("load_error") or ended)

    def send(self, message: Message) -> None:
        """What cannot be sent is not answered, which `exchange` finds. A row of a Parquet file may hold NaN."""
        try:
            self.connection.send_bytes(json.dumps(message, default=str).encode())
        except OSError:
            pass

    def receive(self) -> Message:
        """The next message; {"gone"} if there will be none."""
        try:
            message: Message = strict_json.loads(self.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return {"gone": True}
        return message

    def kill(self) -> str:
        """Ends it with all that it has started; says how it had ended, if it had."""
        self.connection.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = self.process.wait(SOCKET_TIMEOUT_S)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Pool:
    """Trajectories by number, number n in process n % workers. For one thread at a time.

    setup: of each; step_timeout_s: of an environment between two turns
    """

    def __init__(self, setup: Message, workers: int, step_timeout_s: float) -> None:
        self._setup, self._timeout_s = setup, step_timeout_s
        self._early: dict[int, Message] = {}
        self._workers = [Worker(setup) for _ in range(workers)]
        try:
            for worker in self._workers:
                worker.wait_ready()
        except AgentError:
            self.close()
            raise

    def exchange(self, messages: Mapping[int, Message], ends: Mapping[int, float]) -> dict[int, Message]:
        """Tells each trajectory something, and gives what each says to it: {"say"}, {"done"}, {"error"}, or {"fault":
        why} where its process ended or gave no answer in time, and "neighbour" if it had answered itself. Who ends
        while its question is answered is told nothing any more. All that are alive must be among them. ends: until when
        each must have answered, whatever is left of its step, by the monotonic clock."""
        waiting: dict[Worker, set[int]] = {}
        answers = {number: self._early.pop(number) for number in messages if number in self._early}
        for number, message in messages.items():
            if number in answers:
                continue
            worker = self._of(number)
            worker.send({"id": number, **message})
            waiting.setdefault(worker, set()).add(number)
        gone: dict[Worker, str] = {}
        end = time.monotonic() + self._timeout_s
        soonest = min((ends[number] for number in messages), default=end)
        while waiting:
            ready = wait([worker.connection for worker in waiting], max(0.0, min(end, soonest) - time.monotonic()))
            if not ready:
                gone |= (late := self._late(waiting, ends, end))
                waiting = {worker: asked for worker, asked in waiting.items() if worker not in late}
                soonest = min((ends[number] for asked in waiting.values() for number in asked), default=end)
            for worker in [worker for worker in waiting if worker.connection in ready]:
                message = worker.receive()
                if "gone" in message:
                    gone[worker] = "ended its process"
                    del waiting[worker]
                elif (teller := message.get("id", -1)) in waiting[worker]:
                    answers[teller] = message
                    waiting[worker].remove(teller)
                    if not waiting[worker]:
                        del waiting[worker]
                elif teller in answers:
                    self._early[teller] = message
        return answers | self._replaced(gone, messages, answers)

    def _late(self, waiting: Mapping[Worker, set[int]], ends: Mapping[int, float], end: float) -> dict[Worker, str]:
        """Of processes that are waited for those that are late now, with what for; end: of this step's time"""
        now = time.monotonic()
        if now >= end:
            return dict.fromkeys(waiting, f"gave no answer within {self._timeout_s:g} s (agent.step_timeout_s)")
        return {worker: LATE for worker, asked in waiting.items() if any(ends[number] <= now for number in asked)}

    def _replaced(
        self, gone: Mapping[Worker, str], messages: Mapping[int, Message], answers: Mapping[int, Message]
    ) -> dict[int, Message]:
        """The faults of trajectories whose processes are lost, which others take the places of. Of these processes
        all are lost but those that are done."""
        faults: dict[int, Message] = {
            number: {"fault": gone[worker], "neighbour": number in answers}
            for number in messages
            if (worker := self._of(number)) in gone and "done" not in answers.get(number, {})
        }
        for worker, why in gone.items():
            how = worker.kill()
            if "process" in why:
                for number in faults:
                    if self._of(number) is worker:
                        faults[number]["fault"] = f"{why} ({how})"
        for worker in gone:
            new = Worker(self._setup)
            new.wait_ready()
            self._workers[self._workers.index(worker)] = new
        return faults

    def drop(self) -> None:
        """Ends all trajectories."""
        self._early.clear()
        for worker in self._workers:
            worker.send({"drop": True})

    def end(self, number: int) -> None:
        """Ends one that waits for its turn, and leaves the others of its process alone."""
        self._early.pop(number, None)
        self._of(number).send({"id": number, "drop": True})

    def close(self) -> None:
        """Ends the processes; safe to call twice."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _of(self, number: int) -> Worker:
        return self._workers[number % len(self._workers)]


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    root = os.pathsep.join([_PACKAGE_ROOT, path] if path else [_PACKAGE_ROOT])
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": root}
