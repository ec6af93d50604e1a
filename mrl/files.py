"""Files that other processes rely on: whole or not there, made durable, and held while they are read.

The standard library only, and none of its slow parts: the launcher reads it before torch is there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

LOCK_TIMEOUT_S = 60.0
_POLL_S = 0.05
_WITHOUT = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class NoLocks(OSError):
    """A file system without locks."""


def make_private(directory: Path) -> None:
    """The directory is there; if it is new, its owner's alone (mode 0700). Its parents are as the umask has them."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(0o700, exist_ok=True)


def write_atomically(file: Path, content: str | bytes, *, durable: bool = False) -> None:
    """The content as `replacing` writes it. Its mode is as the umask has it. durable: as there."""
    with replacing(file, durable=durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_privately(file: Path, content: str) -> None:
    """As `write_atomically`, and readable by its owner alone (mode 0600), from the first byte on."""
    with replacing(file) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600, exist_ok=False)
        temporary.write_text(content)


@contextmanager
def replacing(file: Path, *, durable: bool = False) -> Iterator[Path]:
    """A hidden neighbour to write, which is `file` after that: a reader finds the old content or the new one, never a
    part.

    If that fails (disk full) or is broken off by a signal, the old content stays and nothing is left of the new one. A
    killed process can leave the neighbour, .NAME.PID.RANDOM.tmp. Processes may write the same file, also those of
    several machines: the last one wins.

    durable: it survives a power cut from then on
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        yield temporary
        if durable:
            sync(temporary)
            rename_durably(temporary, file)
        else:
            temporary.rename(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Of a file or a folder: it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(directory: Path) -> None:
    """Of a tree: the names in it survive a power cut. What the files hold is for who writes them."""
    for folder in [*(path for path in directory.rglob("*") if path.is_dir()), directory]:
        sync(folder)


def rename_durably(path: Path, final: Path) -> None:
    """A file or a folder, within its folder; it has the new name after a power cut, too."""
    os.rename(path, final)
    sync(final.parent)


def sizes(directory: Path) -> dict[str, int]:
    """Path within `directory` -> bytes, of all files in the tree: for a manifest, which is written after them."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def lock_for_reading(file: IO[Any], timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Shared, until the file is closed. Who removes what it stands for locks it for a moment. Does nothing where the
    file system has no locks: no run writes there, or removes anything.

    Raises ValueError if somebody holds it longer than `timeout_s`.
    """
    with contextlib.suppress(NoLocks):
        if not lock(file, shared=True, timeout_s=timeout_s):
            raise ValueError(f"{file.name} has been locked by another process for {timeout_s:g} s")


def lock(file: IO[Any] | int, *, shared: bool = False, timeout_s: float = 0.0) -> bool:
    """Whether an open file's lock could be had within `timeout_s`: alone, or shared with others who share it. It is
    held until the file, and what processes have inherited of it, is closed. Raises NoLocks."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        except OSError as error:
            if error.errno in _WITHOUT:
                raise NoLocks(_without_locks(file, error)) from None
            raise


def _without_locks(file: IO[Any] | int, error: OSError) -> str:
    number = file if isinstance(file, int) else file.fileno()
    where = f"file {number}"
    with contextlib.suppress(OSError):
        where = os.path.dirname(os.readlink(f"/proc/self/fd/{number}"))
    said = (
        f"the file system of {where} has no locks (flock: {error.strerror}), without which two runs could write there"
    )
    return f"{said}: mount it with them (Lustre: -o localflock is enough), or choose another directory"


def file_error(error: BaseException) -> BaseException:
    """`error`, or the OSError that torch.save hides: on a full disk it complains of its own archive, with a plain
    RuntimeError, while the file's error is being handled."""
    below = error.__context__ if type(error) is RuntimeError else None
    while below is not None and not isinstance(below, OSError):
        below = below.__context__
    return below or error
