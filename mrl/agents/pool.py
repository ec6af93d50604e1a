"""Worker pool of agents' programs, on rank 0."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import Any

from mrl import strict_json
from mrl.agents.errors import AgentError
from mrl.worker_process import STARTUP_TIMEOUT_S, WorkerProcess

LATE = "or another trajectory in its process did not finish in time (agent.trajectory_timeout_s)"

Message = dict[str, Any]


class Worker(WorkerProcess):
    """One worker process. setup: as in `mrl.agents.worker`. Raises AgentError if it does not start."""

    def __init__(self, setup: Message) -> None:
        super().__init__("mrl.agents.worker")
        self.send({"sys_path": sys.path, **setup})

    def wait_ready(self) -> None:
        message = self.receive() if self.connection.poll(STARTUP_TIMEOUT_S) else {}
        if "ready" not in message:
            ended = f"its process ended ({self.kill()}) or hangs while importing the file"
            raise AgentError(message.get("load_error") or ended)

    def send(self, message: Message) -> None:
        """Sends a message. A failure to send shows up in `exchange` as a missing answer. A row of a Parquet file may
        hold NaN.
        """
        try:
            self.connection.send_bytes(json.dumps(message, default=str).encode())
        except OSError:
            pass

    def receive(self) -> Message:
        """Returns the next message; {"gone"} if there will be none."""
        try:
            message: Message = strict_json.loads(self.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return {"gone": True}
        return message


class AgentWorkerPool:
    """Worker pool: trajectory number n runs in process n % workers. For one thread at a time.

    setup: of each process; step_timeout_s: longest step of an environment between two turns
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
        """Sends each trajectory a message and returns each one's answer.

        Answers are {"say"}, {"done"}, {"error"}, or {"fault": why} if its process ended or did not answer in time, with
        "neighbour" if the trajectory itself had answered. A trajectory that ends while its request is answered receives
        no further message. All live trajectories must be included. ends: deadline of each by the monotonic clock, which
        overrides the rest of its step.
        """
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
        """Returns the processes that are late now, with the reason. end: of this step's time"""
        now = time.monotonic()
        if now >= end:
            return dict.fromkeys(waiting, f"did not respond within {self._timeout_s:g} s (agent.step_timeout_s)")
        return {worker: LATE for worker, asked in waiting.items() if any(ends[number] <= now for number in asked)}

    def _replaced(
        self, gone: Mapping[Worker, str], messages: Mapping[int, Message], answers: Mapping[int, Message]
    ) -> dict[int, Message]:
        """Replaces lost processes; returns the faults of their trajectories, which are all lost except finished
        ones.
        """
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
        """Ends one trajectory that waits for its turn; others in its process continue."""
        self._early.pop(number, None)
        self._of(number).send({"id": number, "drop": True})

    def close(self) -> None:
        """Ends the processes; safe to call twice."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _of(self, number: int) -> Worker:
        return self._workers[number % len(self._workers)]
