"""Worker pool: processes that answer messages, so that a hang or a crash in one of them costs its own work only.

`concurrent.futures` cannot end a call that hangs, and a crash breaks its pool; pebble ends calls, but gives each a
process of its own, while an agent's program exchanges many messages in a process that it shares with others.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

from mrl import strict_json
from mrl.workers.child import NUMBER
from mrl.workers.event_loop import EventLoopThread

STARTUP_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0  # of a killed process; only one that waits for a device takes so long
RESPONSE_S = 1.0  # a process whose event loop is free answers a ping much sooner
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])

Message = dict[str, Any]


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
        """Sends a message and returns the answer. Raises SessionFault: `late`, or how the process ended."""
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


class WorkerProcess:
    """Runs `python -m MODULE FD PARENT_PID` in its own session, so that the trainer alone handles Ctrl-C.

    Made in the event loop whose thread is to end with it (see `child`, also for the protocol). It is a new interpreter,
    not a fork: it starts in 0.1 s, and the user's code finds none of the trainer's imports.

    loaded: why it cannot be used, once that is known; empty if it is ready
    sessions: what each has sent, by its number; is_spent: takes no further sessions, and ends with its last one
    """

    def __init__(self, module: str, setup: Mapping[str, Any], what: str) -> None:
        self.sessions: dict[int, asyncio.Queue[Message]] = {}
        self.is_spent = False
        self.loaded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._what, self._pong = what, asyncio.Event()
        self._why, self._is_own = "ended its process ({how})", True
        self._writer: asyncio.StreamWriter | None = None
        first = pickle.dumps({"sys_path": sys.path, **setup})
        path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        self._running = asyncio.create_task(self._run(ours, first))

    def send(self, number: int, message: bytes) -> None:
        """Sends a message of a session; the loss of the process shows in the answers."""
        if self._writer is not None and not self._writer.is_closing():
            _write(self._writer, NUMBER.pack(number) + message)

    async def give_up(self, number: int) -> None:
        """Ends a session that does not answer: alone, if the process has others and still answers a ping. As a thread
        of the session may go on, the process takes no further ones."""
        self.send(number, b"")
        self.is_spent = True
        if len(self.sessions) > 1:
            self._pong.clear()
            self.send(0, b"")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._pong.wait(), RESPONSE_S)
                return
        self.end()

    def end(self) -> None:
        """Ends the process, unless it is ending, and tells its sessions that none of them is at fault."""
        self.is_spent = True
        if self._writer is not None and not self._writer.is_closing():
            self._why, self._is_own = "shared its process with a program that hangs", False
            self._running.cancel()

    async def _run(self, ours: socket.socket, setup: bytes) -> None:
        """Hands what the process sends to its sessions, until it ends or is to end."""
        problem = ""
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            _write(self._writer, setup)
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                problem = (await _receive(reader)).get("load_error", "")
            self.loaded.set_result(problem)
            while not problem:
                message = await _receive(reader)
                if message["id"] == 0:
                    self._pong.set()
                elif (answers := self.sessions.get(message["id"])) is not None:
                    answers.put_nowait(message)
        except TimeoutError:
            late = f"was not ready {STARTUP_TIMEOUT_S:.0f} s after its start"
            problem = f"{late}: the import of the file takes too long or hangs"
        except (asyncio.IncompleteReadError, OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # it has ended, or the user's code writes to the connection
        finally:
            self.is_spent = True
            if self._writer is not None:
                self._writer.close()
            how = await asyncio.to_thread(self._kill)
            if not self.loaded.done():
                self.loaded.set_result(f"{self._what}: a worker {problem or f'died while loading it ({how})'}")
            for answers in self.sessions.values():
                answers.put_nowait({"gone": self._why.format(how=how), "is_own": self._is_own})

    def _kill(self) -> str:
        """Kills the process and its children, reaps it, and says how it ended: "exit code 3" or "signal SIGSEGV"."""
        if self.process.returncode is None:  # otherwise its number may be another process's
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # does not change how a dead, unreaped process ended
        try:
            code = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"it did not end within {END_TIMEOUT_S:.0f} s of signal SIGKILL"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Sends a frame of multiprocessing.connection."""
    head = struct.pack("!i", len(data)) if len(data) < 1 << 31 else struct.pack("!iQ", -1, len(data))
    writer.write(head + data)


async def _receive(reader: asyncio.StreamReader) -> Message:
    (size,) = struct.unpack("!i", await reader.readexactly(4))
    if size == -1:
        (size,) = struct.unpack("!Q", await reader.readexactly(8))
    message: Message = strict_json.loads(await reader.readexactly(size))
    return message
