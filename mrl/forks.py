"""Fork servers: a process that has imported the modules of a program, and is forked for each start of it, which saves
the seconds of the imports.

`multiprocessing`'s fork server starts from an empty interpreter, so it would import torch once more for each command,
and only its maker can use it: a rank could not start an engine.

The server decides what a fork becomes: a rank is a child of its launcher (launcher/fork_server.py), an engine has a
supervisor that reports its end (inference/fork_server.py). Where forking is impossible (no Linux; imports that fail,
start threads or open a GPU), programs are started instead.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from mrl.imports import importing

TIMEOUT_S = 180.0  # of a start, which waits for the imports
BACKLOG = 128

_libc = ctypes.CDLL(None, use_errno=True)  # before a fork, whose other threads might hold its locks
_OPENED_BY_CUDA = ("/dev/nvidia-uvm", "/dev/dxg")
_SET_DEATH_SIGNAL = 1  # of prctl


@dataclass(frozen=True)
class ForkRequest:
    """Request to start a process. arguments: after `python -m`. folder: working directory. owner: process id of the
    client."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    folder: str
    owner: int

    def send(self, connection: Connection, files: Sequence[int]) -> None:
        """Sends the request. files: stdin, stdout and stderr. Raises OSError if the other side has ended."""
        connection.send_bytes(json.dumps(asdict(self)).encode())
        for file in files:
            send_handle(connection, file, 0)

    @classmethod
    def receive(cls, connection: Connection) -> tuple[ForkRequest, list[int]]:
        """Returns a request with its files, for `redirect_stdio`. Raises EOFError or OSError if the other side has
        ended."""
        request = cls(**json.loads(connection.recv_bytes()))
        return request, [recv_handle(connection) for _ in range(3)]


# Receives a request and returns it in the process that is to run it. Second argument: variables that the imports set
Become = Callable[[Connection, Mapping[str, str]], ForkRequest]


class ForkServer:
    """A fork of this process that has imported a module; as a context manager it ends then, and its forks live on.

    Construct it while nothing is open that a fork would close: a fork leaves the constructor by SystemExit.
    """

    def __init__(self, name: str, imports: str, become: Become) -> None:
        """name: of its socket. imports: module imported there while this process goes on."""
        self.path: Path | None = None
        self._maker = os.getpid()
        if sys.platform != "linux" or cannot_fork():
            return
        path = Path(tempfile.mkdtemp(prefix="mrl-forks-"), name)
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(str(path))
            except OSError:  # too long a name
                path.parent.rmdir()
                return
            listener.listen(BACKLOG)
            sys.stdout.flush()
            sys.stderr.flush()
            self._pid = os.fork()
            if self._pid == 0:
                serve(listener, imports, become)
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._maker == os.getpid():  # not in a fork of this process
            self.close()

    def close(self) -> None:
        if self.path is not None:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            shutil.rmtree(self.path.parent, ignore_errors=True)
            self.path = None


def serve(listener: socket.socket, imports: str, become: Become) -> NoReturn:
    """Runs a fork server. Only forks return from it, by SystemExit."""
    try:
        os.setsid()
        die_with_parent()
        output = os.memfd_create("output")
        redirect_stdio([os.open(os.devnull, os.O_RDONLY), os.dup(output), os.dup(output)])
        before = dict(os.environ)
        with importing():  # without it, each fork would copy all pages at its first collection
            importlib.import_module(imports)
        made = {name: value for name, value in os.environ.items() if before.get(name) != value}
        if cannot_fork():
            os._exit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection = Connection(listener.accept()[0].detach())
            if os.fork() == 0:
                break
            connection.close()
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        request = become(connection, made)
        if request.env.get("RANK") == "0":
            os.write(2, os.pread(output, os.fstat(output).st_size, 0))
    except BaseException:  # programs meet and report the same error
        os._exit(1)
    run_module(request)


def request_fork(
    path: Path, command: Sequence[str], env: Mapping[str, str], files: Sequence[int], folder: str = ""
) -> tuple[int, Connection] | None:
    """Returns the id of a process that runs `command`, and the connection to it.

    path: socket of the fork server. files: stdin, stdout and stderr. folder: working directory, relative to this
    process's

    Returns None if `command` must start as a program: it is not `-m` of this Python, or the fork server is unavailable.
    """
    python, *options = command
    unbuffered = options[:1] == ["-u"]
    if python != sys.executable or options[unbuffered : unbuffered + 1] != ["-m"]:
        return None
    request = ForkRequest(options[unbuffered + 1 :], dict(env), os.path.abspath(folder), os.getpid())
    connection = None
    try:
        connection = Client(str(path), "AF_UNIX")
        request.send(connection, files)
        if connection.poll(TIMEOUT_S):
            return int(connection.recv_bytes()), connection
    except (OSError, EOFError):
        pass
    if connection is not None:
        connection.close()  # a fork that comes too late ends
    return None


class Process:
    """A forked process with the part of `subprocess.Popen`'s interface that is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, or minus the signal that killed the process; None while it runs."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> int:
        """Returns the code of `poll` once the process has ended. Raises subprocess.TimeoutExpired after `timeout`
        seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code


def cannot_fork() -> bool:
    """True if this process has threads, which a fork would lack, or CUDA, which does not work in a fork."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return len(os.listdir("/proc/self/task")) > 1 or any(link.startswith(_OPENED_BY_CUDA) for link in links)


def redirect_stdio(files: Sequence[int]) -> None:
    """Replaces stdin, stdout and stderr by these files."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)


def run_module(request: ForkRequest) -> NoReturn:
    """Runs `python -m` of the request in a forked process. Ends by SystemExit."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.folder)
    tempfile.tempdir = None  # cached by an import
    warnings.filterwarnings("ignore", ".* found in sys.modules after import", RuntimeWarning)  # intended here
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, *arguments = request.arguments
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception:  # code that this process ran before must not handle it
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        _libc.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
