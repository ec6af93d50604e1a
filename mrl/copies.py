"""Processes that begin as copies of one that has done their imports: what they are told, and what they become."""

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
BIRTH_S = 60.0  # for a copy: a moment, on a machine that is not out of memory


@dataclass(frozen=True)
class Order:
    """A process that is wanted. arguments: what follows `python -m`. folder: where it works."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    folder: str

    def send(self, line: socket.socket, files: Sequence[int]) -> None:
        """files: what is to be its stdin, stdout and stderr. Raises OSError if the other side has ended."""
        text = json.dumps(asdict(self)).encode()
        socket.send_fds(line, [packed(len(text))], files)
        line.sendall(text)

    @classmethod
    def receive(cls, line: socket.socket) -> tuple[Order, list[int]] | None:
        """With its files, for `speak_through`; None at the end of the line."""
        size, files, _, _ = socket.recv_fds(line, _NUMBER, 3)
        return (cls(**json.loads(read(line, int.from_bytes(size, "big")))), files) if size else None


class Process:
    """A process that is a copy, as far as `subprocess.Popen` is asked for one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that killed it; None while it runs."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code


def packed(number: int) -> bytes:
    return number.to_bytes(_NUMBER, "big")


def read_number(line: socket.socket) -> int | None:
    """None if the other side has ended before it wrote one, by `packed`."""
    found = read(line, _NUMBER)
    return int.from_bytes(found, "big") if found else None


def read(line: socket.socket, size: int) -> bytes:
    """Empty if the other side has ended before."""
    found = b""
    while len(found) < size:
        piece = line.recv(size - len(found))
        if not piece:
            return b""
        found += piece
    return found


def cannot_be_copied() -> bool:
    """There are threads, which a copy would lack, or CUDA, which does not work in a copy."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return len(os.listdir("/proc/self/task")) > 1 or any(link.startswith(_OPENED_BY_CUDA) for link in links)


def speak_through(files: Sequence[int]) -> None:
    """Stdin, stdout and stderr are these from now on."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)


def live(order: Order) -> NoReturn:
    """`python -m` in a process that has begun as another one. Ends by SystemExit."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.folder)
    tempfile.tempdir = None  # found by an import
    warnings.filterwarnings("ignore", ".* found in sys.modules after import", RuntimeWarning)  # as it is to be
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, *arguments = order.arguments
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def die_with_parent() -> None:
    """The kernel is to kill this process when its parent dies, however that dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
