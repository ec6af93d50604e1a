"""Forked processes: the request that a fork server receives, and how the fork becomes that process."""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

_OPENED_BY_CUDA = ("/dev/nvidia-uvm", "/dev/dxg")
_NUMBER = 8  # bytes
_SET_DEATH_SIGNAL = 1  # of prctl
FORK_TIMEOUT_S = 60.0  # timeout of a fork, which is fast unless memory is short


@dataclass(frozen=True)
class ForkRequest:
    """Request to start a process. arguments: after `python -m`. folder: working directory."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    folder: str

    def send(self, connection: socket.socket, files: Sequence[int]) -> None:
        """Sends the request. files: its stdin, stdout and stderr. Raises OSError if the other side has ended."""
        text = json.dumps(asdict(self)).encode()
        socket.send_fds(connection, [pack_number(len(text))], files)
        connection.sendall(text)

    @classmethod
    def receive(cls, connection: socket.socket) -> tuple[ForkRequest, list[int]] | None:
        """Returns a request with its files, for `redirect_stdio`; None at the end of the stream."""
        size, files, _, _ = socket.recv_fds(connection, _NUMBER, 3)
        return (cls(**json.loads(read(connection, int.from_bytes(size, "big")))), files) if size else None


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


def pack_number(number: int) -> bytes:
    return number.to_bytes(_NUMBER, "big")


def read_number(connection: socket.socket) -> int | None:
    """Returns a number written by `pack_number`; None if the other side ended before."""
    found = read(connection, _NUMBER)
    return int.from_bytes(found, "big") if found else None


def read(connection: socket.socket, size: int) -> bytes:
    """Returns `size` bytes; empty if the other side ended before."""
    found = b""
    while len(found) < size:
        piece = connection.recv(size - len(found))
        if not piece:
            return b""
        found += piece
    return found


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
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
