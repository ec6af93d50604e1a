"""Worker pool of agents' programs, on rank 0: processes, each of which plays several trajectories at once."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
import time
from itertools import count
from typing import Any

from mrl import strict_json
from mrl.agents.errors import AgentError
from mrl.worker_process import STARTUP_TIMEOUT_S, WorkerProcess

RESPONSE_S = 1.0  # a process whose event loop is free answers a ping much sooner

Message = dict[str, Any]


class ProgramFault(Exception):
    """A program failed on a trajectory. is_own: False if the fault is of another trajectory in its process."""

    def __init__(self, text: str, is_own: bool = True, traceback: str = "") -> None:
        super().__init__(text)
        self.is_own, self.traceback = is_own, traceback


class Worker(WorkerProcess):
    """One worker process. setup: as in `mrl.agents.worker`. Raises AgentError if it does not start."""

    def __init__(self, setup: Message) -> None:
        super().__init__("mrl.agents.worker")
        self.live: dict[int, asyncio.Queue[Message]] = {}  # by trajectory, what it has sent
        self.is_spent = False  # takes no further trajectories, and ends with its last one
        self.is_attached = self.is_closed = False
        self.pongs = asyncio.Queue[Message]()
        self.connection.send_bytes(json.dumps({"sys_path": sys.path, **setup}).encode())

    def wait_ready(self) -> None:
        message: Message = {}
        try:
            if self.connection.poll(STARTUP_TIMEOUT_S):
                message = strict_json.loads(self.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            pass
        if "ready" not in message:
            ended = f"its process ended ({self.kill()}) or hangs while importing the file"
            raise AgentError(message.get("load_error") or ended)

    async def attach(self) -> None:
        """Reads what the process sends, in this event loop from now on."""
        end = socket.socket(fileno=os.dup(self.connection.fileno()))
        end.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=end)
        self._reading, self.is_attached = asyncio.ensure_future(self._read(reader)), True

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hands each message to its trajectory. The frames are those of multiprocessing.connection."""
        try:
            while True:
                (size,) = struct.unpack("!i", await reader.readexactly(4))
                if size == -1:
                    (size,) = struct.unpack("!Q", await reader.readexactly(8))
                message = strict_json.loads(await reader.readexactly(size))
                queue = self.pongs if "pong" in message else self.live.get(message.get("id", -1))
                if queue is not None:
                    queue.put_nowait(message)
        except (asyncio.IncompleteReadError, OSError, ValueError, AttributeError, struct.error):
            await self.end("ended its process ({how})", is_own=True)

    def send(self, message: Message) -> None:
        """Sends a message; the loss of the process shows in the answers. A row of a Parquet file may hold NaN."""
        data = json.dumps(message, default=str).encode()
        head = struct.pack("!i", len(data)) if len(data) < 1 << 31 else struct.pack("!iQ", -1, len(data))
        if not self.is_closed:
            self._writer.write(head + data)

    async def end(self, why: str, is_own: bool) -> None:
        """Ends the process and tells its trajectories why: {how} stands for how it ended. is_own: any of those that are
        waited for may have caused it."""
        if self.is_closed:
            return
        self.is_closed = self.is_spent = True
        self._writer.close()
        how = await asyncio.to_thread(self.kill)
        for queue in self.live.values():
            queue.put_nowait({"gone": why.format(how=how), "is_own": is_own})
        if self._reading is not asyncio.current_task():
            self._reading.cancel()

    async def answers(self) -> bool:
        """Whether its event loop still runs, so that one trajectory alone hangs."""
        self.send({"ping": True})
        try:
            await asyncio.wait_for(self.pongs.get(), RESPONSE_S)
        except TimeoutError:
            return False
        return True


class AgentWorkerPool:
    """Worker pool. A new trajectory goes to the process with the fewest.

    setup: of each process; step_timeout_s: longest step of an environment between two turns
    """

    def __init__(self, setup: Message, workers: int, step_timeout_s: float) -> None:
        self._setup, self._size, self.step_timeout_s = setup, workers, step_timeout_s
        self._numbers, self._filling, self._is_closed = count(), asyncio.Lock(), False
        self.workers = [Worker(setup) for _ in range(workers)]
        try:
            for worker in self.workers:
                worker.wait_ready()
        except AgentError:
            self.close()
            raise

    async def begin(self) -> Program:
        """Returns a place for one trajectory. All trajectories have to be in one event loop."""
        async with self._filling:
            if self._is_closed:
                raise AgentError("the agents' worker pool is closed")
            for worker in self.workers:
                if not worker.is_attached:
                    await worker.attach()
            self._remove_spent()
            while sum(not worker.is_spent for worker in self.workers) < self._size:
                worker = Worker(self._setup)
                self.workers.append(worker)  # first, so that `close` ends it too
                await asyncio.to_thread(worker.wait_ready)
                await worker.attach()
        worker = min((each for each in self.workers if not each.is_spent), key=lambda each: len(each.live))
        program = Program(self, worker, next(self._numbers))
        worker.live[program.number] = asyncio.Queue()
        return program

    def _remove_spent(self) -> None:
        for worker in [each for each in self.workers if each.is_spent and not each.live]:
            self.workers.remove(worker)
            worker.kill()

    def close(self) -> None:
        """Ends the processes; safe to call twice."""
        self._is_closed = True
        for worker in self.workers:
            worker.kill()
        self.workers = []


class Program:
    """The program of one trajectory, in its process. An asynchronous context manager, which ends it there."""

    def __init__(self, pool: AgentWorkerPool, worker: Worker, number: int) -> None:
        self._pool, self._worker, self.number = pool, worker, number
        self._has_ended = False

    async def __aenter__(self) -> Program:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if not self._has_ended:
            self._worker.send({"id": self.number, "drop": True})
        del self._worker.live[self.number]

    async def exchange(self, message: Message, ends_at: float, late: str) -> Message:
        """Sends a message and returns the answer: {"say"}, {"chat"} or {"done"}.

        Args:
            ends_at: deadline of the trajectory by the monotonic clock; late: the reason if it passes.

        Raises ProgramFault if the program raised, did not answer in time, or its process ended.
        """
        answers = self._worker.live[self.number]
        has_asked = answers.empty()  # otherwise it ended while its turn was generated
        if has_asked:
            self._worker.send({"id": self.number, **message})
        now, step_s = time.monotonic(), self._pool.step_timeout_s
        try:
            answer = await asyncio.wait_for(answers.get(), max(0.0, min(step_s, ends_at - now)))
        except TimeoutError:
            await self._give_up()
            silent = f"did not respond within {step_s:g} s (agent.step_timeout_s)"
            raise ProgramFault(late if ends_at < now + step_s else silent) from None
        if "gone" in answer:
            raise ProgramFault(answer["gone"], is_own=answer["is_own"] and has_asked)
        self._has_ended = "done" in answer or "error" in answer
        if "error" in answer:
            raise ProgramFault(f"raised {answer['error']}", traceback=answer["traceback"])
        return answer

    async def _give_up(self) -> None:
        """Ends the hanging program alone where the process still answers. As a thread of it may go on, the process
        takes no further trajectories."""
        self._worker.send({"id": self.number, "drop": True})
        self._has_ended = True
        if await self._worker.answers():
            self._worker.is_spent = True
        else:
            await self._worker.end("shared its process with a program that hangs", is_own=False)
