"""Files that other processes rely on: atomic writes, durability, locks.

Standard library only, without its slow modules: the launcher uses it before torch is imported.
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
    """The file system has no locks."""


def make_private(directory: Path) -> None:
    """Creates the directory with mode 0700 if it is new; its parents follow the umask."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(0o700, exist_ok=True)


def write_atomically(file: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Writes the content as `replacing` does, with the umask's mode. durable: as in `replacing`"""
    with replacing(file, durable=durable) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_privately(file: Path, content: str) -> None:
    """Writes like `write_atomically`, with mode 0600 from the first byte on."""
    with replacing(file) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600, exist_ok=False)
        temporary.write_text(content)


@contextmanager
def replacing(file: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields a hidden neighbour to write, which then becomes `file`: readers find the old or the new content, never a
    part.

    If that fails (disk full) or a signal interrupts it, the old content stays and the new one is removed. A killed
    process
    can leave the neighbour, .NAME.PID.RANDOM.tmp. Several processes and machines may write the same file: the last one
    wins.

    durable: the content then survives a power cut
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
    """Syncs a file or folder to disk, so that it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(directory: Path) -> None:
    """Syncs all names of a tree, so that they survive a power cut; not the files' content."""
    for folder in [*(path for path in directory.rglob("*") if path.is_dir()), directory]:
        sync(folder)


def rename_durably(path: Path, final: Path) -> None:
    """Renames a file or folder within its folder; the new name survives a power cut."""
    os.rename(path, final)
    sync(final.parent)


def sizes(directory: Path) -> dict[str, int]:
    """Returns path within `directory` -> bytes for all files of the tree, for a manifest, which is written later."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def lock_for_reading(file: IO[Any], timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Takes a shared lock until the file is closed; a process that removes what the file stands for locks it
    exclusively.

    Does nothing if the file system has no locks, since no run writes or removes anything there. Raises ValueError if
    another process holds the lock longer than `timeout_s`.
    """
    with contextlib.suppress(NoLocks):
        if not lock(file, shared=True, timeout_s=timeout_s):
            raise ValueError(f"{file.name} has been locked by another process for more than {timeout_s:g} s")


def lock(file: IO[Any] | int, *, shared: bool = False, timeout_s: float = 0.0) -> bool:
    """Returns True if the open file's lock was taken within `timeout_s`, exclusively or shared.

    The lock is held until the file, and every inherited copy of it, is closed. Raises NoLocks.
    """
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
    said = f"the file system of {where} has no locks (flock: {error.strerror}), which keep two runs from writing there"
    return f"{said}: mount it with them (Lustre: -o localflock is enough), or choose another directory"


def file_error(error: BaseException) -> BaseException:
    """Returns `error`, or the OSError that torch.save hides behind a RuntimeError about its archive when the disk is
    full."""
    below = error.__context__ if type(error) is RuntimeError else None
    while below is not None and not isinstance(below, OSError):
        below = below.__context__
    return below or error
