"""Worker pool: processes that answer messages, so that a hang or a crash in one of them costs its own work only.

`concurrent.futures` cannot end a call that hangs, and a crash breaks its pool; pebble ends calls, but gives each a
process of its own, while an agent's program exchanges many messages in a process that it shares with others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from itertools import count
from typing import Any

from mrl.workers.event_loop import EventLoopThread
from mrl.workers.process import END_TIMEOUT_S, STARTUP_TIMEOUT_S, Message, WorkerProcess


class SessionFault(Exception):
    """A session failed. is_own: False if the fault is of another one in its process; details: a traceback"""

    def __init__(self, text: str, is_own: bool = True, details: str = "") -> None:
        super().__init__(text)
        self.is_own, self.details = is_own, details


class WorkerPool:
    """Runs `size` processes of `module`, which are replaced when they hang or end. `child` is their side of it.

    The constructor blocks until all are ready. With `is_shared` a new session goes to the process with the fewest;
    otherwise a process has one at a time, and further ones wait in order. `session` is used in `loop` only.

    Args:
        name: Of the thread.
        setup: Of each process.
        error: Raised if a process cannot load `what`, or the pool is closed.
    """

    def __init__(
        self,
        name: str,
        module: str,
        setup: Mapping[str, Any],
        size: int,
        *,
        what: str,
        error: type[Exception],
        is_shared: bool = False,
    ) -> None:
        self._new = lambda: WorkerProcess(module, setup, what)
        self._size, self._error = size, error
        self._slots = nullcontext() if is_shared else asyncio.Semaphore(size)
        self._numbers = count(1)
        self.workers: list[WorkerProcess] = []
        # One thread starts and serves all workers: the kernel ends them with the thread that started them.
        self.loop = EventLoopThread(name, error("the worker pool is closed"))
        try:
            self.loop.submit(self._start()).result(STARTUP_TIMEOUT_S + 2 * END_TIMEOUT_S)
        except TimeoutError:
            self.loop.close()
            raise error(f"{what}: no worker started within {STARTUP_TIMEOUT_S:.0f} s") from None
        except BaseException:
            self.loop.close()
            raise

    def close(self) -> None:
        """Ends all processes; safe to call twice. Whoever waits gets `error`."""
        self.loop.close()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Yields a session in a process that is ready."""
        async with self._slots:
            worker = self._least_busy()
            while worker.process.poll() is not None:  # it has ended between sessions
                worker.is_spent = True
                worker = self._least_busy()
            session = Session(worker, next(self._numbers))
            try:
                await self._ready(worker)
                yield session
            finally:
                session.close()

    async def _start(self) -> None:
        self.workers += [self._new() for _ in range(self._size)]
        await asyncio.gather(*map(self._ready, self.workers))

    def _least_busy(self) -> WorkerProcess:
        self.workers = [self._new() if worker.is_spent else worker for worker in self.workers]
        return min(self.workers, key=lambda worker: (len(worker.sessions), not worker.loaded.done()))

    async def _ready(self, worker: WorkerProcess) -> None:
        if problem := await asyncio.shield(worker.loaded):
            raise self._error(problem)


class Session:
    """Messages and answers of one call or program, in one process."""

    def __init__(self, worker: WorkerProcess, number: int) -> None:
        self._worker, self._number, self._is_over = worker, number, False
        self._answers = worker.sessions[number] = asyncio.Queue[Message]()

    async def exchange(self, message: bytes, timeout_s: float, late: str) -> Message:
        """Sends a message and returns the answer. Raises SessionFault: `late` if there is none in time, or how the
        process ended.
        """
        is_asked = self._answers.empty()  # otherwise it has ended since its last answer
        if is_asked:
            self._worker.send(self._number, message)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._answers.get()
        except TimeoutError:
            self._is_over = True
            await self._worker.give_up(self._number)
            raise SessionFault(late) from None
        self._is_over = "last" in answer
        if "gone" in answer:
            raise SessionFault(answer["gone"], answer["is_own"] and is_asked)
        return answer

    def close(self) -> None:
        """Ends what still runs of it in the process."""
        del self._worker.sessions[self._number]
        if not self._is_over:
            self._worker.send(self._number, b"")
        if self._worker.is_spent and not self._worker.sessions:
            self._worker.end()
