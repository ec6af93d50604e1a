"""A process that has imported what engines of one kind import on a CPU, and is copied for each that is started.

`mrl train` makes it while it looks at the configuration, and it ends with that: an engine that is started again is a
copy, too. A copy is a supervisor (supervisor.py), whose engine is a copy of it. It belongs to the process that wanted
the engine, which is told how it has ended, but is not its parent. Where that cannot be (no Linux, no fork server, an
import that fails, variables that the imports would read otherwise) engines are started as programs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

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
from mrl.rollout import supervisor
from mrl.rollout.launch import KEPT_MEMORY

try:
    import setproctitle

    setproctitle.getproctitle()  # looks for its room beside the environment, before that is changed
except ImportError:
    setproctitle = None  # type: ignore[assignment]

VARIABLE = "MRL_ENGINE_FORK_SERVERS"  # a folder that is this account's alone, with a socket for each kind of engine
BACKLOG = 128
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
_READ_BY_IMPORTS = ("LD_", "OMP_", "MKL_", "TORCHDYNAMO_", "PYTORCH_", "HF_", "TRANSFORMERS_", "SGLANG_")
_READ_LATER = ("SGLANG_",)  # those that are not there while sglang is imported


class EngineForkServer:
    """Make it where nothing is open that an engine would close, and use it as a context manager: an engine ends by
    SystemExit out of the constructor."""

    def __init__(self, engine: str, imports: str) -> None:
        """engine: the kind; imports: the module that has them all."""
        self._folder: Path | None = None
        self._maker = os.getpid()
        if sys.platform != "linux" or cannot_fork():
            return
        folder = Path(tempfile.mkdtemp(prefix="mrl-engines-"))
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(str(folder / engine))
            except OSError:  # too long a name
                folder.rmdir()
                return
            listener.listen(BACKLOG)
            sys.stdout.flush()
            sys.stderr.flush()
            self._pid = os.fork()
            if self._pid == 0:
                serve(listener, imports)
        self._folder, os.environ[VARIABLE] = folder, str(folder)

    def __enter__(self) -> EngineForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is not None and self._maker == os.getpid():  # ranks, too, may be copies of this process
            os.environ.pop(VARIABLE, None)
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            shutil.rmtree(self._folder, ignore_errors=True)


def is_there(engine: str) -> bool:
    """Around this process is one for such engines."""
    return VARIABLE in os.environ and Path(os.environ[VARIABLE], engine).is_socket()


class Copy(Process):
    """The supervisor of an engine, which is no child of this process."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        super().__init__(pid)
        self._line, self._looking = line, threading.RLock()
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        with self._looking:  # threads may ask, too
            if self.returncode is None and _is_readable(self._line.fileno()):
                try:
                    code = read_number(self._line)
                except OSError:
                    code = None
                self.returncode = -signal.SIGKILL if code is None else code
                self._line.close()
                os.close(self._handle)
        return self.returncode

    def send_signal(self, number: int) -> None:
        with self._looking, contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def copy(
    engine: str | None, command: Sequence[str], env: Mapping[str, str], grace_s: float, folder: Path, out: int
) -> Copy | None:
    """An engine under its supervisor, which removes `folder` after it; out: where both write. None: it is to be started
    as a program."""
    python, *options = command
    if engine is None or not is_there(engine) or python != sys.executable or options[:1] != ["-m"]:
        return None
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(FORK_TIMEOUT_S)
    order = ForkRequest([str(grace_s), str(folder), *options[1:]], dict(env), os.getcwd())
    try:
        line.connect(str(Path(os.environ[VARIABLE], engine)))
        with open(os.devnull, "rb") as nothing:
            order.send(line, (nothing.fileno(), out, out))
        if (pid := read_number(line)) is not None:
            return Copy(pid, line)
    except OSError:  # what is too late finds the line closed, and ends
        pass
    line.close()
    return None


def serve(listener: socket.socket, imports: str) -> NoReturn:
    """The fork server. Only an engine returns from it, by SystemExit."""
    try:
        os.setsid()
        die_with_parent()
        nothing = os.open(os.devnull, os.O_RDWR)
        redirect_stdio([os.dup(nothing), os.dup(nothing), nothing])  # an engine that is a program meets the same
        for name, value in KEPT_MEMORY.items():  # which glibc looks for when a program starts
            ctypes.CDLL(None).mallopt(_MALLOPT[name], int(os.environ.get(name, value)))
        with importing():
            importlib.import_module(imports)
        if cannot_fork():
            os._exit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            line, _ = listener.accept()
            if os.fork() == 0:
                break
            line.close()
    except BaseException:
        os._exit(1)
    listener.close()
    _become_a_supervisor(line)


def _become_a_supervisor(line: socket.socket) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line.settimeout(FORK_TIMEOUT_S)
    try:
        received = ForkRequest.receive(line)
        if received is None or not _is_like_here(received[0].env):
            os._exit(1)
        order, files = received
        redirect_stdio(files)
        owner = os.pidfd_open(_peer(line))
        line.sendall(pack_number(os.getpid()))
    except Exception:  # nobody waits any more, or not for a copy
        os._exit(1)
    grace_s, folder, *arguments = order.arguments
    engine = ForkRequest(arguments, order.env, order.folder)
    _show(str(supervisor.__file__), *arguments)
    try:
        code = supervisor.supervise(
            lambda: _Engine(engine, line, owner), lambda: _is_readable(owner), float(grace_s), folder
        )
        line.sendall(pack_number(code))
    except OSError:
        os._exit(1)
    os._exit(code)


class _Engine:
    """A copy of this process, without the supervisor's line and owner."""

    def __init__(self, order: ForkRequest, line: socket.socket, owner: int) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            supervisor.in_child()
            line.close()
            os.close(owner)
            _show("-m", *order.arguments)
            try:
                run_module(order)
            except SystemExit:
                raise
            except BaseException:  # not to be met by what this process was before
                traceback.print_exc()
                sys.exit(1)


def _is_like_here(env: Mapping[str, str]) -> bool:
    """Would a program with this environment have imported the same?"""
    here = {name: value for name, value in os.environ.items() if name.startswith(_READ_BY_IMPORTS)}
    there = {name: value for name, value in env.items() if name.startswith(_READ_BY_IMPORTS)}
    more = {name for name in there.keys() - here.keys() if not name.startswith(_READ_LATER)}
    return not more and all(there.get(name) == value for name, value in here.items())


def _is_readable(file: int) -> bool:
    """Of a process: it has ended."""
    poll = select.poll()  # `select` knows the first 1024 files alone
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


def _peer(line: socket.socket) -> int:
    """The process at its other end."""
    credentials = struct.Struct("3i")
    found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return int(credentials.unpack(found)[0])


def _show(*arguments: str) -> None:
    """In /proc, as this process's command line, as far as it can be had."""
    if setproctitle is not None:
        setproctitle.setproctitle(" ".join([sys.executable, *arguments]))
