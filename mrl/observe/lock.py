"""One owner a run directory: a lock file with host and process, kept fresh by a heart-beat."""

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
FORGOTTEN_S = 120.0  # without a heart-beat, by this host's clock, for those who only look
SILENCE_S = 20.0  # an owner on another host that lets this pass without a heart-beat is taken for dead


class RunLocked(RuntimeError):
    """Another live process owns the run directory."""


@dataclass(frozen=True)
class Owner:
    host: str
    pid: int
    born: str  # the process's start time: a reused pid is another process

    @classmethod
    def of(cls, pid: int) -> Owner:
        return cls(socket.gethostname(), pid, _born(pid))

    def write(self, file: Path) -> None:
        write_atomically(file, json.dumps(asdict(self)) + "\n")


class Lock:
    """Held from construction to `release()`.

    A lock whose process is gone is taken over. A process on this host is looked up; one on another host counts as
    alive if its heart-beat moves within `silence_s`. Raises RunLocked if the owner lives, NoLocks where the file system
    has no locks, by which one process of this host at a time looks.
    """

    def __init__(self, file: Path, silence_s: float = SILENCE_S, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.file = file
        self._me = Owner.of(os.getpid())
        with _alone(file.parent):
            owner = read_owner(file)
            if owner is None and file.exists():
                print(f"{file} is empty, as a crash may leave it: it is nobody's", flush=True)
            if owner is not None and _alive(owner, file, silence_s):
                raise RunLocked(
                    f"{file.parent} is in use by process {owner.pid} on {owner.host}: stop that run, or choose another "
                    f"run.name (if you are sure that it is gone, delete {file})"
                )
            self._me.write(file)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(heartbeat_s,), daemon=True, name="run-lock")
        self._thread.start()

    def release(self) -> None:
        """Ends the heart-beat and removes the file, unless somebody else owns it by now."""
        self._stop.set()
        self._thread.join()
        if read_owner(self.file) == self._me:
            self.file.unlink()

    def _beat(self, every_s: float) -> None:
        while not self._stop.wait(every_s):
            with suppress(OSError, RunLocked):  # a file server that fails once is asked again
                if read_owner(self.file) == self._me:
                    os.utime(self.file)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this host at a time looks at the lock and replaces it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        if not lock(handle, timeout_s=LOCK_TIMEOUT_S):
            raise RunLocked(f"another process of this host has looked whose {folder} is for {LOCK_TIMEOUT_S:g} s")
        yield
    finally:
        os.close(handle)


def read_owner(file: Path) -> Owner | None:
    """Who has written the lock file; None if there is none, or nothing in it: what a crashed machine leaves of one, as
    it is put in its place whole. Raises RunLocked for a file that is no lock."""
    try:
        text = file.read_text().strip("\0")
        return Owner(**json.loads(text)) if text else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise RunLocked(f"{file} is not a lock file of this program ({error}); look at it, then delete it") from error


def is_owned(file: Path) -> bool:
    """Whether a process of this host that lives, or one elsewhere that was heard of lately, has written the lock file;
    waits for nobody."""
    try:
        owner = read_owner(file)
    except RunLocked:
        return False
    if owner is None:
        return False
    if owner.host == socket.gethostname():
        return _born(owner.pid) == owner.born != ""
    beat = _beats(file)
    return beat is not None and time.time() - beat / 1e9 < FORGOTTEN_S


def _alive(owner: Owner, file: Path, silence_s: float) -> bool:
    if owner.host == socket.gethostname():
        return _born(owner.pid) == owner.born != ""
    before, deadline = _beats(file), time.monotonic() + silence_s
    print(f"waiting up to {silence_s:.0f} s for a sign of process {owner.pid} on {owner.host} ({file})", flush=True)
    while time.monotonic() < deadline:
        time.sleep(min(0.5, silence_s / 10))
        now = _beats(file)
        if now is None:
            return False
        if now != before:
            return True
    return False


def _beats(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _born(pid: int) -> str:
    """Start time of a living process in kernel ticks; empty if there is none (a zombie counts as gone)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]
