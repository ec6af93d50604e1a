"""Runs one engine and makes sure that nothing of it is left. Started by path as a process of its own, or in a copy of
one that has imported what the engine does (fork_server.py); stdlib only.

    python supervisor.py PARENT_PID GRACE_S FOLDER COMMAND...

The supervisor ends the engine when it is told to (SIGTERM, SIGINT) and when its parent is gone, however that died:
SIGTERM first, SIGKILL to everything that is left after GRACE_S seconds. It is the subreaper of the engine's whole
tree, so that processes orphaned inside the engine become its children and cannot get away. If the engine ends by
itself, what is left of its tree is killed too. The exit code is the engine's (128 + n where signal n ended it).
FOLDER, which holds the engine's temporary files, is removed then, and so are its files in /dev/shm.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.5
WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
SHARED = "/dev/shm/sgl"  # SGLang makes one a start, more with several ranks, and leaves them when it is killed
SHARED_S = 4.0  # between looks at which ones it has: an engine that has died of itself holds none any more
TRACKER_S = 1.0  # Python's tracker of semaphores, which removes them when all others are gone

libc = ctypes.CDLL(None, use_errno=True)


def prepare() -> None:
    """Makes this process the supervisor of what it starts next."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def in_child() -> None:
    """Prepares a child of the supervisor to be the engine."""
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


def _descendants() -> list[int]:
    found = [os.getpid()]
    for pid in found:
        with contextlib.suppress(OSError):  # it has just ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                found += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return found[1:]


def _read(file: str) -> str:
    try:
        with open(file, errors="replace") as opened:
            return opened.read()
    except OSError:
        return ""


def _shared_files() -> set[str]:
    lines = [line for pid in _descendants() for line in _read(f"/proc/{pid}/maps").splitlines() if SHARED in line]
    return {line[line.index(SHARED) :].removesuffix(" (deleted)") for line in lines}


def _kill_all(main_pid: int) -> None:
    """SIGKILL until no descendant is left: children of what was killed come to us and are killed next."""
    trackers_end = time.monotonic() + TRACKER_S
    while left := _descendants():
        spared = [pid for pid in left if "multiprocessing.resource_tracker" in _read(f"/proc/{pid}/cmdline")]
        if time.monotonic() > trackers_end:
            spared = []
        for pid in set(left).difference(spared):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        _reap(main_pid)


def _wait(
    main_pid: int, is_left: Callable[[], bool], deadline: float | None, shared: set[str]
) -> tuple[int | None, bool]:
    """(exit code of the engine or None, whether we were told or have reason to stop it). Fills in `shared`."""
    look = time.monotonic() + SHARED_S
    while deadline is None or time.monotonic() < deadline:
        if time.monotonic() >= look:
            shared.update(_shared_files())
            look += SHARED_S
        caught = signal.sigtimedwait(WATCHED, POLL_S)
        code = _reap(main_pid)
        if code is not None:
            return code, False
        told = caught is not None and caught.si_signo in (signal.SIGTERM, signal.SIGINT)
        if deadline is None and (told or is_left()):
            return None, True
    return None, True


def main(argv: list[str]) -> int:
    parent, grace_s, folder, command = int(argv[1]), float(argv[2]), argv[3], argv[4:]
    prepare()
    if os.getppid() != parent:
        return 1
    engine = subprocess.Popen(command, start_new_session=True, preexec_fn=in_child)
    return supervise(engine.pid, lambda: os.getppid() != parent, grace_s, folder)


def supervise(engine: int, is_left: Callable[[], bool], grace_s: float, folder: str) -> int:
    """Waits for the engine's end and returns its exit code. is_left: tells whether the engine's owner is gone."""
    shared: set[str] = set()
    code, stop = _wait(engine, is_left, None, shared)
    shared.update(_shared_files())
    if stop:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGTERM)
        code, _ = _wait(engine, is_left, time.monotonic() + grace_s, shared)
    _kill_all(engine)
    for file in shared:
        with contextlib.suppress(OSError):
            os.unlink(file)
    shutil.rmtree(folder, ignore_errors=True)
    if code is None:
        return 128 + signal.SIGKILL
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
