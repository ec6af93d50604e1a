"""A directory that appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from mrl.files import rename_durably, sync_folders
from mrl.weights.errors import WeightError

SPARE_BYTES = 16 << 20  # for everything small: descriptions, tokenizer, the file system's own


class Staging:
    """Makes a directory under a hidden name beside `target`; `commit` gives it its name, leaving without it removes it.

    What a killed process has left there is removed first; a process that still writes there holds a lock. Raises
    WeightError if `target` exists and is not empty, if another process is writing it, or if the disk has less room than
    `needed_bytes`.
    """

    def __init__(self, target: Path, needed_bytes: int) -> None:
        self.target = target.absolute()
        self.directory = self.target.with_name(f".{self.target.name}.partial")
        self.needed_bytes = needed_bytes
        self._lock = -1

    def __enter__(self) -> Staging:
        target = self.target
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise WeightError(f"{target} exists and is not empty; remove it or choose another directory")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(target.with_name(f".{target.name}.lock"))
            shutil.rmtree(self.directory, ignore_errors=True)
            require_space(target, self.needed_bytes)
            self.directory.mkdir()
        except OSError as error:
            self._release()
            raise WeightError(f"cannot write {target}: {error}") from error
        except WeightError:
            self._release()
            raise
        return self

    def commit(self) -> None:
        """Everything becomes durable, then visible."""
        sync_folders(self.directory)
        if self.target.exists():  # and empty
            self.target.rmdir()
        rename_durably(self.directory, self.target)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            self.target.with_name(f".{self.target.name}.lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def require_space(target: Path, needed_bytes: int) -> None:
    """Raises WeightError, with both sizes, if the disk of `target`'s parent has less room."""
    needed, free = needed_bytes + SPARE_BYTES, shutil.disk_usage(target.parent).free
    if free < needed:
        raise WeightError(f"no room for {target}: {size(needed)} needed, {size(free)} free on its disk")


def size(count: float) -> str:
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.4g} {units[0]}"


def _locked(file: Path) -> int:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise WeightError(f"another process is writing there (it holds {file})") from None
    return descriptor
