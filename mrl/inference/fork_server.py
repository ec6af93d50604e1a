"""Fork server of engines of one kind on a CPU: it has imported what they import, and is forked for each.

`mrl train` makes it while it checks the configuration; it ends with that. A fork is a supervisor (supervisor.py), whose
engine is a fork of it. The process that asked for an engine is told how it has ended, but is not its parent. An engine
starts as a program if the imports would read other values of environment variables.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from mrl.forks import ForkRequest, ForkServer, Process, redirect_stdio, request_fork
from mrl.inference import supervisor

try:
    import setproctitle

    setproctitle.getproctitle()  # looks for its room beside the environment, before that is changed
except ImportError:
    setproctitle = None  # type: ignore[assignment]

VARIABLE = "MRL_ENGINE_FORK_SERVERS"  # a folder that is this account's alone, with a socket for each kind of engine
_READ_BY_IMPORTS = ("LD_", "OMP_", "MKL_", "TORCHDYNAMO_", "PYTORCH_", "HF_", "TRANSFORMERS_", "SGLANG_")
_READ_LATER = ("SGLANG_",)  # those that are not set while sglang is imported


class EngineForkServer(ForkServer):
    """Fork server of this process and all that it starts."""

    def __init__(self, engine: str, imports: str) -> None:
        super().__init__(engine, imports, become_supervisor)
        if self.path is not None:
            os.environ[VARIABLE] = str(self.path.parent)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.path is None:
            os.environ.pop(VARIABLE, None)


def is_there(engine: str) -> bool:
    """True if a fork server of such engines serves this process."""
    return VARIABLE in os.environ and Path(os.environ[VARIABLE], engine).is_socket()


class SupervisorProcess(Process):
    """Supervisor of an engine, which is no child of this process."""

    def __init__(self, pid: int, connection: Connection) -> None:
        super().__init__(pid)
        self._connection, self._lock = connection, threading.RLock()
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with self._lock:  # several threads may ask
            if self.returncode is None and self._connection.poll():
                try:
                    self.returncode = int(self._connection.recv_bytes())
                except (OSError, EOFError):
                    self.returncode = -signal.SIGKILL
                self._connection.close()
                os.close(self._handle)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    engine: str | None, command: Sequence[str], env: Mapping[str, str], grace_s: float, folder: Path, out: int
) -> SupervisorProcess | None:
    """Starts an engine under its supervisor, which removes `folder` after it. out: file to which both write. Returns
    None if it must start as a program."""
    if engine is None or not is_there(engine):
        return None
    arguments = [*command[:2], str(grace_s), str(folder), *command[2:]]
    with open(os.devnull, "rb") as nothing:
        made = request_fork(Path(os.environ[VARIABLE], engine), arguments, env, (nothing.fileno(), out, out))
    return SupervisorProcess(*made) if made is not None else None


def become_supervisor(connection: Connection, imported: Mapping[str, str]) -> ForkRequest:
    """Supervises the engine in this process until its end; returns only in the engine, a fork."""
    request, files = ForkRequest.receive(connection)
    if not _is_like_here(request.env):
        os._exit(1)
    redirect_stdio(files)
    owner = os.pidfd_open(request.owner)
    connection.send_bytes(str(os.getpid()).encode())
    grace_s, folder, *arguments = request.arguments
    supervisor.prepare()
    if (engine := os.fork()) == 0:
        os.setsid()
        supervisor.in_child()
        connection.close()
        os.close(owner)
        _show("-m", *arguments)
        return replace(request, arguments=arguments)
    _show(str(supervisor.__file__), *arguments)
    # the handle of a process that has ended is readable
    code = supervisor.supervise(engine, lambda: bool(wait([owner], 0)), float(grace_s), folder)
    with contextlib.suppress(OSError):  # the owner is gone
        connection.send_bytes(str(code).encode())
    os._exit(code)


def _is_like_here(env: Mapping[str, str]) -> bool:
    """True if a program with this environment would have imported the same."""
    names = {name for name in {**os.environ, **env} if name.startswith(_READ_BY_IMPORTS)}
    return all(
        env.get(name) == os.environ.get(name) or (name.startswith(_READ_LATER) and name not in os.environ)
        for name in names
    )


def _show(*arguments: str) -> None:
    """Sets this process's command line in /proc, as far as possible."""
    if setproctitle is not None:
        setproctitle.setproctitle(" ".join([sys.executable, *arguments]))
