"""Files that other processes rely on: made durable, and held while they are read."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import IO, Any

LOCK_TIMEOUT_S = 60.0
_POLL_S = 0.05


def sync(path: Path) -> None:
    """Of a file or a folder: it survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_for_reading(file: IO[Any], timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Shared, until the file is closed. Who removes what it stands for locks it for a moment.

    Raises ValueError if somebody holds it longer than `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise ValueError(f"{file.name} has been locked by another process for {timeout_s:g} s") from None
            time.sleep(_POLL_S)


def file_error(error: BaseException) -> BaseException:
    """`error`, or the OSError that torch.save hides: on a full disk it complains of its own archive, with a plain
    RuntimeError, while the file's error is being handled."""
    below = error.__context__ if type(error) is RuntimeError else None
    while below is not None and not isinstance(below, OSError):
        below = below.__context__
    return below or error
