"""One process of a worker pool."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mrl import strict_json
from mrl.workers.child import NUMBER

STARTUP_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0  # of a killed process; only one that waits for a device takes so long
RESPONSE_S = 1.0  # a process whose event loop is free answers a ping much sooner
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])

Message = dict[str, Any]


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
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,
            )
        self._running = asyncio.create_task(self._run(ours, first))

    def send(self, number: int, message: bytes) -> None:
        """Sends a message of a session; the loss of the process shows in the answers."""
        if self._writer is not None and not self._writer.is_closing():
            _write(self._writer, NUMBER.pack(number) + message)

    async def give_up(self, number: int) -> None:
        """Ends a session that does not answer: alone, if the process still answers and has others. As a thread of the
        session may go on, the process takes no further ones.
        """
        self.send(number, b"")
        self.is_spent = True
        if len(self.sessions) == 1 or not await self._answers():
            self.end()

    def end(self) -> None:
        """Ends the process, unless it is ending, and tells its sessions that none of them is at fault."""
        self.is_spent = True
        if self._writer is not None and not self._writer.is_closing():
            self._why, self._is_own = "shared its process with a program that hangs", False
            self._running.cancel()

    async def _answers(self) -> bool:
        """Returns True if its event loop still runs, so that one session alone hangs."""
        self._pong.clear()
        self.send(0, b"")
        try:
            await asyncio.wait_for(self._pong.wait(), RESPONSE_S)
        except TimeoutError:
            return False
        return True

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


def _environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    root = os.pathsep.join([_PACKAGE_ROOT, path] if path else [_PACKAGE_ROOT])
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": root}
