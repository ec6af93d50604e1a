"""Exclusive ownership of a run directory: a lock file with host and process, refreshed by a heartbeat."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mrl.files import LOCK_TIMEOUT_S, lock, write_atomically

HEARTBEAT_S = 5.0
FORGOTTEN_S = 120.0  # since the last heartbeat, by this host's clock; for readers that do not take the lock
SILENCE_S = 20.0  # without a heartbeat, after which an owner on another host counts as dead


class RunLocked(RuntimeError):
    """Another live process owns the run directory."""


@dataclass(frozen=True)
class Owner:
    host: str
    pid: int
    born: str  # the process's start time: a reused pid is another process

    @classmethod
    def of(cls, pid: int) -> Owner:
        return cls(socket.gethostname(), pid, _start_time(pid))

    def write(self, file: Path) -> None:
        write_atomically(file, json.dumps(asdict(self)) + "\n")


class Lock:
    """Ownership of a run directory, held from construction to `release()`.

    The lock of a dead process is taken over. A process on this host is looked up; a process on another host counts as
    alive if its heartbeat changes within `silence_s`. One process of this host at a time checks the lock. Raises
    RunLocked if the owner is alive, NoLocks if the file system has no locks.
    """

    def __init__(self, file: Path, silence_s: float = SILENCE_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.file = file
        self._me = Owner.of(os.getpid())
        with _exclusive(file.parent):
            owner = read_owner(file)
            if owner is None and file.exists():
                print(f"{file} is empty, probably after a crash: taking the lock", flush=True)
            if owner is not None and _alive(owner, file, silence_s):
                raise RunLocked(
                    f"{file.parent} is in use by process {owner.pid} on {owner.host}: stop that run, or choose another "
                    f"run.name (if that process is certainly gone, delete {file})"
                )
            self._me.write(file)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(heartbeat_s,), daemon=True, name="run-lock")
        self._thread.start()

    def release(self) -> None:
        """Stops the heartbeat and removes the file, unless another process owns it by now."""
        self._stop.set()
        self._thread.join()
        if read_owner(self.file) == self._me:
            self.file.unlink()

    def _beat(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            with suppress(OSError, RunLocked):  # a file server may fail once; the next heartbeat retries
                if read_owner(self.file) == self._me:
                    os.utime(self.file)


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Lets one process of this host at a time check and replace the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not lock(handle, timeout_s=LOCK_TIMEOUT_S):
            raise RunLocked(
                f"another process of this host has been checking the lock of {folder} for more than "
                f"{LOCK_TIMEOUT_S:g} s: start the run again, or stop that process"
            )
        yield
    finally:
        os.close(handle)


def read_owner(file: Path) -> Owner | None:
    """Returns the owner in the lock file; None if the file is missing or empty.

    A crashed machine may leave an empty file, since the file is replaced as a whole. Raises RunLocked for a file that
    is not a lock.
    """
    try:
        text = file.read_text().strip("\0")
        return Owner(**json.loads(text)) if text else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise RunLocked(f"{file} is not a lock file of mrl ({error}): inspect it, then delete it") from error


def is_owned(file: Path) -> bool:
    """True if the lock's owner lives on this host, or has a recent heartbeat on another one; never waits."""
    try:
        owner = read_owner(file)
    except RunLocked:
        return False
    if owner is None:
        return False
    if owner.host == socket.gethostname():
        return _start_time(owner.pid) == owner.born != ""
    beat = _heartbeat(file)
    return beat is not None and time.time() - beat / 1e9 < FORGOTTEN_S


def _alive(owner: Owner, file: Path, silence_s: float) -> bool:
    if owner.host == socket.gethostname():
        return _start_time(owner.pid) == owner.born != ""
    before, deadline = _heartbeat(file), time.monotonic() + silence_s
    print(
        f"waiting up to {silence_s:.0f} s for a heartbeat of process {owner.pid} on {owner.host} ({file})", flush=True
    )
    while time.monotonic() < deadline:
        time.sleep(min(0.5, silence_s / 10))
        now = _heartbeat(file)
        if now is None:
            return False
        if now != before:
            return True
    return False


def _heartbeat(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _start_time(pid: int) -> str:
    """Start time of a living process in kernel ticks; empty if there is none (a zombie counts as dead)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]
