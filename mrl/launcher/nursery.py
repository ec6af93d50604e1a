"""A process that has imported what ranks need, and is copied for each: they start at once, and share its memory.

It is a copy of this process, made when this one has imported what it needs itself, and opened nothing. A rank is a copy
of it, becomes this process's child, and does what `python -m MODULE ...` would do in the environment and with the files
that it is given, in a session of its own. Where that cannot be (no Linux, an import that fails, starts threads or opens
a GPU) ranks are started as programs.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

from mrl.imports import importing
from mrl.launcher.environment import FOR_COPIES
from mrl.launcher.signals import WARNINGS
from mrl.resilience.rank import die_with_parent

IMPORTS_S = 600.0  # if they take longer, ranks are started as programs

_ADOPT_ORPHANS = 36  # of prctl
_OPENED_BY_CUDA = ("/dev/nvidia-uvm", "/dev/dxg")
_NUMBER = 8  # bytes
BIRTH_S = 60.0  # for a copy: a moment, on a machine that is not out of memory
_READY = b"!"


class Child:
    """A process that a nursery has made, as far as `subprocess.Popen` is asked for one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that killed it; None while it runs."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self._reap(0 if end is None else os.WNOHANG)) is None:
            if timeout is not None and end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass(frozen=True)
class Order:
    """A process that is wanted. arguments: what follows `python -m`. folder: where it works."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    folder: str


class Nursery:
    """Make it where nothing is open that a rank would close: a rank ends by SystemExit out of the constructor."""

    def __init__(self, module: str = "mrl.preload") -> None:
        """module: imported there, while this process goes on."""
        self._line: socket.socket | None = None
        self._is_ready = False
        if sys.platform != "linux" or _cannot_be_copied():
            return
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            live(serve(theirs, module))
        theirs.close()
        self._line = ours

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def is_settled(self, timeout_s: float) -> bool:
        """Does it know by then whether it can start ranks?"""
        if self._line is not None and not self._is_ready and select.select([self._line], [], [], timeout_s)[0]:
            self._is_ready = self._line.recv(1) == _READY
            if not self._is_ready:
                self.close()
        return self._line is None or self._is_ready

    def close(self) -> None:
        """Its ranks live on."""
        if self._line is not None:
            self._line.close()
            self._line = None
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def start(self, command: Sequence[str], env: Mapping[str, str], files: tuple[int, int, int]) -> Child | None:
        """A child of this process, with those files as stdin, stdout and stderr. Waits for the imports. None: `command`
        is to be started as a program, since it is not this Python's `-m`, or this cannot."""
        python, *options = command
        unbuffered = options[:1] == ["-u"]
        if python != sys.executable or options[unbuffered : unbuffered + 1] != ["-m"]:
            return None
        return self.make(Order(options[unbuffered + 1 :], dict(env), os.getcwd()), files)

    def make(self, order: Order, files: tuple[int, int, int]) -> Child | None:
        if not self.is_settled(IMPORTS_S):
            self.close()
        if self._line is None:
            return None
        text = json.dumps(asdict(order)).encode()
        _adopt_orphans(True)
        self._line.settimeout(BIRTH_S)
        try:
            socket.send_fds(self._line, [len(text).to_bytes(_NUMBER, "big")], files)
            self._line.sendall(text)
            answer = _read(self._line, _NUMBER)
        except TimeoutError:  # not to be started otherwise: it may still come
            self.close()
            raise TimeoutError(f"the process that ranks are copied from made none within {BIRTH_S:g} s") from None
        except OSError:
            answer = b""
        finally:
            _adopt_orphans(False)
        if not answer:
            self.close()
            return None
        return Child(int.from_bytes(answer, "big"))


def serve(line: socket.socket, module: str) -> Order:
    """The nursery, at its end of the line. It returns in copies alone, with stdin, stdout and stderr theirs."""
    parent = os.getppid()
    try:
        os.setsid()
        die_with_parent()
        said = tempfile.TemporaryFile()
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        os.environ |= FOR_COPIES | os.environ
        before = dict(os.environ)
        with importing():  # and else each copy would write to all the pages at its first collection
            importlib.import_module(module)
        made = {name: value for name, value in os.environ.items() if before.get(name) != value}
        if _cannot_be_copied():
            os._exit(1)
        line.sendall(_READY)
        while received := _receive(line):
            order, files = received
            if (pid := _bear(parent)) == 0:
                line.close()
                _speak_through(files, said if order.env.get("RANK") == "0" else None)
                return replace(order, env={**order.env, **made})  # as the imports would have set it there
            for file in files:
                os.close(file)
            line.sendall(pid.to_bytes(_NUMBER, "big"))
    except BaseException:  # ranks meet the same when they are started as programs, and say it
        os._exit(1)
    os._exit(0)


def _cannot_be_copied() -> bool:
    """There are threads, which a copy would lack, or CUDA, which does not work in a copy."""
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return len(os.listdir("/proc/self/task")) > 1 or any(link.startswith(_OPENED_BY_CUDA) for link in links)


def _receive(line: socket.socket) -> tuple[Order, list[int]] | None:
    """None at the end."""
    size, files, _, _ = socket.recv_fds(line, _NUMBER, 3)
    return (Order(**json.loads(_read(line, int.from_bytes(size, "big")))), files) if size else None


def _bear(parent: int) -> int:
    """The id of a copy of this process; 0 in the copy. It is left by its own parent, so that `parent` adopts it."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(writing, os.getpid().to_bytes(_NUMBER, "big"))
        os.close(reading)
        os.close(writing)
        while os.getppid() == between:
            time.sleep(0.001)
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        return 0
    os.close(writing)
    pid = os.read(reading, _NUMBER)
    os.close(reading)
    os.waitpid(between, 0)
    if not pid:
        raise OSError("no process could be made")
    return int.from_bytes(pid, "big")


def _speak_through(files: Sequence[int], said: BinaryIO | None) -> None:
    """said: what the imports had to say is passed on."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if said is not None:
        said.seek(0)
        os.write(2, said.read())


def live(order: Order) -> NoReturn:
    """`python -m` in a process that has begun as another one. Ends by SystemExit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in WARNINGS:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.folder)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, *arguments = order.arguments
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


def _read(line: socket.socket, size: int) -> bytes:
    """Empty if the other side has ended before."""
    read = b""
    while len(read) < size:
        piece = line.recv(size - len(read))
        if not piece:
            return b""
        read += piece
    return read


def _adopt_orphans(wanted: bool) -> None:
    """Does this process become the parent of a grandchild whose parent ends?"""
    ctypes.CDLL(None, use_errno=True).prctl(_ADOPT_ORPHANS, int(wanted), 0, 0, 0)
