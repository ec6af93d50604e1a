"""Runs one engine and makes sure that nothing of it is left. Started by path as a process of its own; stdlib only.

    python supervisor.py PARENT_PID GRACE_S COMMAND...

The supervisor ends the engine when it is told to (SIGTERM, SIGINT) and when its parent is gone, however that died:
SIGTERM first, SIGKILL to everything that is left after GRACE_S seconds. It is the subreaper of the engine's whole
tree, so that processes orphaned inside the engine become its children and cannot get away. If the engine ends by
itself, what is left of its tree is killed too. The exit code is the engine's (128 + n where signal n ended it).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.5
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}

libc = ctypes.CDLL(None, use_errno=True)


def _in_child() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the supervisor itself be killed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)


def _reap(main_pid: int) -> int | None:
    """Collect every dead child; the main process's exit code if it was among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == main_pid:
                code = os.waitstatus_to_exitcode(status)
    return code


def _children() -> list[int]:
    me = os.getpid()
    with open(f"/proc/{me}/task/{me}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _kill_all(main_pid: int) -> None:
    """SIGKILL until no descendant is left: children of what was killed come to us and are killed next."""
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(main_pid, signal.SIGKILL)
        _reap(main_pid)
        left = _children()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _wait(main_pid: int, parent: int, deadline: float | None) -> tuple[int | None, bool]:
    """(exit code of the engine or None, whether we were told or have reason to stop it)."""
    while deadline is None or time.monotonic() < deadline:
        caught = signal.sigtimedwait(WATCHED, POLL_S)
        code = _reap(main_pid)
        if code is not None:
            return code, False
        told = caught is not None and caught.si_signo in (signal.SIGTERM, signal.SIGINT)
        if deadline is None and (told or os.getppid() != parent):
            return None, True
    return None, True


def main(argv: list[str]) -> int:
    parent, grace_s, command = int(argv[1]), float(argv[2]), argv[3:]
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    if os.getppid() != parent:
        return 1
    engine = subprocess.Popen(command, start_new_session=True, preexec_fn=_in_child)
    code, stop = _wait(engine.pid, parent, None)
    if stop:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGTERM)
        code, _ = _wait(engine.pid, parent, time.monotonic() + grace_s)
    _kill_all(engine.pid)
    if code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
