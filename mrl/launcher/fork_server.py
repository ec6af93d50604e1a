"""Fork server of the ranks: a rank becomes a child of this process, in a session of its own, and dies with it."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

from mrl.forks import ForkRequest, ForkServer, Process, die_with_parent, redirect_stdio, request_fork

_ADOPT_ORPHANS = 36  # of prctl


class RankForkServer(ForkServer):
    """Fork server whose forks become children of this process."""

    def __init__(self, imports: str = "mrl.rank_imports") -> None:
        super().__init__("ranks", imports, become_child)

    def start(
        self, command: Sequence[str], env: Mapping[str, str], files: Sequence[int], folder: str = ""
    ) -> Child | None:
        """Returns a child of this process, or None; parameters and reasons as for `request_fork`."""
        if self.path is None:
            return None
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)  # the fork's parent ends at once
        try:
            made = request_fork(self.path, command, env, files, folder)
        finally:
            prctl(_ADOPT_ORPHANS, 0, 0, 0, 0)
        if made is None:
            self.close()
            return None
        made[1].close()
        return Child(made[0])


class Child(Process):
    """A child process of this one."""

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def become_child(connection: Connection, imported: Mapping[str, str]) -> ForkRequest:
    """Forks this process and ends it, so that the fork's parent is the client."""
    request, files = ForkRequest.receive(connection)
    between = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.001)
    die_with_parent()
    if os.getppid() != request.owner:
        os._exit(1)
    redirect_stdio(files)
    connection.send_bytes(str(os.getpid()).encode())
    connection.close()
    return replace(request, env={**request.env, **imported})  # as the imports would set it in a program
