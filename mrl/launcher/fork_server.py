"""Fork server: a process that has imported the ranks' modules and is forked for each rank, which starts at once.

The fork server is a fork of this process, made after this process's own imports and before it opens anything. A rank is
a fork of it, becomes this process's child, and runs `python -m MODULE ...` with the given environment and files in its
own session. If forking is impossible (no Linux, an import that fails, starts threads or opens a GPU), ranks start as
programs.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import BinaryIO

from mrl.forks import (
    FORK_TIMEOUT_S,
    ForkRequest,
    Process,
    cannot_fork,
    die_with_parent,
    pack_number,
    read_number,
    redirect_stdio,
    run_module,
)
from mrl.imports import importing

FOR_FORK_SERVERS = {  # environment variables set before the imports, which would start threads and CUDA
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
IMPORTS_S = 600.0  # timeout of the imports, after which ranks start as programs

_ADOPT_ORPHANS = 36  # of prctl
_READY = b"!"


class Child(Process):
    """A process made by a fork server."""

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkServer:
    """Client of a fork server. Construct it while nothing is open that a rank would close: a rank leaves the
    constructor by SystemExit."""

    def __init__(self, module: str = "mrl.rank_imports") -> None:
        """Starts the fork server. module: imported there while this process goes on."""
        self._connection: socket.socket | None = None
        self._is_ready = False
        if sys.platform != "linux" or cannot_fork():
            return
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            run_module(serve(theirs, module))
        theirs.close()
        self._connection = ours

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_settled(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s`; returns True once it is known whether the fork server works."""
        if self._connection is None or self._is_ready:
            return True
        poll = select.poll()  # `select` is limited to 1024 files
        poll.register(self._connection, select.POLLIN)
        if poll.poll(timeout_s * 1000):
            self._is_ready = self._connection.recv(1) == _READY
            if not self._is_ready:
                self.close()
        return self._connection is None or self._is_ready

    def close(self) -> None:
        """Ends the fork server; its ranks live on."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def start(self, command: Sequence[str], env: Mapping[str, str], files: tuple[int, int, int]) -> Child | None:
        """Returns a child of this process with these stdin, stdout and stderr, after the imports are done.

        Returns None if `command` must start as a program: it is not `-m` of this Python, or the fork server is
        unavailable.
        """
        python, *options = command
        unbuffered = options[:1] == ["-u"]
        if python != sys.executable or options[unbuffered : unbuffered + 1] != ["-m"]:
            return None
        return self.make(ForkRequest(options[unbuffered + 1 :], dict(env), os.getcwd()), files)

    def make(self, order: ForkRequest, files: tuple[int, int, int]) -> Child | None:
        if not self.is_settled(IMPORTS_S):
            self.close()
        if self._connection is None:
            return None
        _adopt_orphans(True)
        self._connection.settimeout(FORK_TIMEOUT_S)
        try:
            order.send(self._connection, files)
            pid = read_number(self._connection)
        except TimeoutError:  # no start as a program: the fork may still come
            self.close()
            raise TimeoutError(
                f"the fork server of the ranks did not start a rank within {FORK_TIMEOUT_S:g} s"
            ) from None
        except OSError:
            pid = None
        finally:
            _adopt_orphans(False)
        if pid is None:
            self.close()
            return None
        return Child(pid)


def serve(connection: socket.socket, module: str) -> ForkRequest:
    """Runs the fork server at its end of the socket. Returns only in forks, with their stdin, stdout and stderr set."""
    parent = os.getppid()
    try:
        os.setsid()
        die_with_parent()
        output = tempfile.TemporaryFile()
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        os.environ |= FOR_FORK_SERVERS | os.environ
        before = dict(os.environ)
        with importing():  # without it, each fork would copy all pages at its first collection
            importlib.import_module(module)
        made = {name: value for name, value in os.environ.items() if before.get(name) != value}
        if cannot_fork():
            os._exit(1)
        connection.sendall(_READY)
        while received := ForkRequest.receive(connection):
            order, files = received
            if (pid := _fork_adopted(parent)) == 0:
                connection.close()
                redirect_stdio(files)
                if order.env.get("RANK") == "0":
                    _print_output(output)
                return replace(order, env={**order.env, **made})  # as the imports would set it in a program
            for file in files:
                os.close(file)
            connection.sendall(pack_number(pid))
    except BaseException:  # ranks that start as programs meet and report the same error
        os._exit(1)
    os._exit(0)


def _fork_adopted(parent: int) -> int:
    """Returns the id of a fork of this process, 0 in the fork, whose own parent exits so that `parent` adopts it."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(writing, pack_number(os.getpid()))
        os.close(reading)
        os.close(writing)
        while os.getppid() == between:
            time.sleep(0.001)
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        return 0
    os.close(writing)
    pid = os.read(reading, len(pack_number(0)))
    os.close(reading)
    os.waitpid(between, 0)
    if not pid:
        raise OSError("no process could be started")
    return int.from_bytes(pid, "big")


def _print_output(output: BinaryIO) -> None:
    """Prints the output of the imports."""
    output.seek(0)
    os.write(2, output.read())


def _adopt_orphans(wanted: bool) -> None:
    """Sets whether this process becomes the parent of orphaned grandchildren."""
    ctypes.CDLL(None, use_errno=True).prctl(_ADOPT_ORPHANS, int(wanted), 0, 0, 0)
