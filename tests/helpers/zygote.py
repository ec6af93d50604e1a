"""Starts programs of mrl without the seconds of their imports, by forking one process that has imported everything.

`start` is like `subprocess.Popen` for `python -m MODULE ...`: the fork gets the environment, working directory and
files, is a child of this process, and shows its own command line and mark in /proc. The imports do not run again, so a
program with other settings that imports read (PYTHONPATH, ...) is started as a new process.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mrl.forks import BACKLOG, ForkRequest, serve
from mrl.launcher.fork_server import RankForkServer, become_child

ROOT = Path(__file__).parents[2]
MARK = "MRL_TEST_RUN"  # environment variable of a program and of all its descendants; its value has 32 characters
_READ_BY_IMPORTS = (
    "PYTHON",
    "OMP_",
    "MKL_",
    "TORCH",
    "HF_",
    "TRANSFORMERS_",
    "MRL_PLATFORM",
    "CUDA",
    "TZ",
    "LANG",
    "LC_",
)
_ROOM = 1024  # bytes reserved for a command line


class Zygote(RankForkServer):
    """A fork server for tests. module: imported before the first fork, with `environment`"""

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.path, self._maker = Path(tempfile.mkdtemp(prefix="mrl-zygote-"), "socket"), os.getpid()
        self.environment = environment
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            listener.listen(BACKLOG)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.zygote", str(listener.fileno()), module, "." * _ROOM],
                cwd=ROOT,
                env={**environment, MARK: "0" * 32},
                pass_fds=[listener.fileno()],
            )
        self._pid = self._process.pid
        atexit.register(shutil.rmtree, self.path.parent, ignore_errors=True)


@cache
def _zygote() -> Zygote:
    return Zygote("mrl.rank_imports", {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})


def start(command: Sequence[str], env: Mapping[str, str], cwd: Path, **more: Any) -> subprocess.Popen[Any]:
    """Starts `command`, as a fork if possible; a fork leads a session. more: file arguments of subprocess.Popen"""
    copied = sys.platform == "linux" and list(command[:2]) == [sys.executable, "-m"] and _is_like_here(env)
    return (
        Copy(_zygote(), command, env=env, cwd=cwd, **more)
        if copied
        else subprocess.Popen(command, env=env, cwd=cwd, **more)
    )


def pid() -> int:
    """Returns the pid of the fork server. The forks inherit its limits."""
    return _zygote()._process.pid


def run(
    *arguments: str | Path, cwd: Path = ROOT, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m *arguments` or kills it after timeout_s; returns the result. environment: more variables"""
    command, pipe = [sys.executable, "-m", *map(str, arguments)], subprocess.PIPE
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    with start(command, env, cwd, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _is_like_here(env: Mapping[str, str]) -> bool:
    here = _zygote().environment
    return all(env.get(name) == here.get(name) for name in {*env, *here} if name.startswith(_READ_BY_IMPORTS))


class Copy(subprocess.Popen[Any]):
    """A Popen whose process is a fork of the zygote."""

    def __init__(self, zygote: Zygote, command: Sequence[str], **more: Any) -> None:
        self._zygote = zygote
        super().__init__(command, **more)

    def _execute_child(self, command: Sequence[str], *more: Any) -> None:
        cwd, env, files = more[4], more[5], more[9:15]  # three pairs: the child's end of a pipe, then the parent's
        ends = (files[0], files[3], files[5])
        ends = [usual if end == -1 else end for usual, end in enumerate(ends)]
        child = self._zygote.start(command, env, ends, str(cwd))
        assert child is not None, "the zygote has ended"
        self.pid, self._child_created = child.pid, True
        self._close_pipe_fds(*files)


def main() -> None:
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], _become_program)


def _become_program(connection: Connection, imported: Mapping[str, str]) -> ForkRequest:
    request = become_child(connection, imported)
    show_command(sys.executable, "-m", *request.arguments)
    if MARK in request.env:
        environment, environment_end = _addresses()[2:]
        place = ctypes.string_at(environment, environment_end - environment).index(f"{MARK}=".encode())
        _show(environment + place + len(MARK) + 1, request.env[MARK].encode())
    return request


def show_command(*command: str) -> None:
    """Shows `command` in /proc as the command line of this process."""
    begin, end = _addresses()[:2]
    line = b"\0".join(map(os.fsencode, command))
    _show(begin, line[: end - begin - 1].ljust(end - begin, b"\0"))


def _addresses() -> list[int]:
    """Returns start and end of the command line, and start and end of the environment, in memory."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return [*map(int, stat[45:49])]


def _show(address: int, text: bytes) -> None:
    """Writes to the memory where the kernel keeps the command line and environment, which /proc shows."""
    ctypes.memmove(address, text, len(text))


if __name__ == "__main__":
    main()
