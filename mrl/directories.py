"""Atomic directories: written under a hidden name, listed by a manifest, and renamed once they are durable.

Standard library only: configuration checks use it before torch is imported.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mrl.files import lock, rename_durably, sizes, sync, sync_folders, write_atomically
from mrl.foreign import own_file, read_json

MANIFEST = "complete"  # the last file that is written; lists every other one with its size
SPARE_BYTES = 16 << 20  # reserve for small files: descriptions, tokenizer, file system metadata
MAX_LISTED = 8


class Unwritable(OSError):
    """A directory cannot be made: its place is taken, another process writes to it, or the disk is full."""


class Damaged(ValueError):
    """A directory with a manifest is incomplete, damaged or of another format."""


class Staging:
    """A directory that will become `target`. Between `begin` and `end`, `directory` is a hidden neighbour of it.

    needed_bytes: expected size, so that a full disk is found first
    overwrite: `commit` replaces an existing target; otherwise the target must be absent or empty
    """

    def __init__(self, target: Path, needed_bytes: int, *, overwrite: bool = False) -> None:
        self.target = target.absolute()
        self.directory = self._beside("partial")
        self._needed_bytes, self._overwrite = needed_bytes, overwrite
        self._lock = -1

    def begin(self) -> None:
        """Makes the directory, after removing the remains of a killed process. Raises Unwritable.

        With `overwrite`, a target that such a process had moved away and not yet replaced gets its name back.
        """
        target = self.target
        if target.exists() and not (target.is_dir() and (self._overwrite or not any(target.iterdir()))):
            raise Unwritable(f"{target} exists and is not empty: remove it, or choose another directory")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._beside("lock"))
            if self._overwrite and (old := self._beside("old")).is_dir() and not target.exists():
                os.rename(old, target)  # a process was killed between the two renames of `commit`
            shutil.rmtree(self.directory, ignore_errors=True)
            require_space(target, self._needed_bytes)
            self.directory.mkdir()
        except OSError as error:
            self._release()
            known = isinstance(error, Unwritable)
            raise error if known else Unwritable(f"cannot write {target}: {error}") from error

    def commit(self) -> None:
        """Makes the content durable, then visible under its name. Raises OSError, with the target unchanged.

        Its files get the umask's mode: safetensors writes them with 0600, so other accounts could not load the model.
        """
        readable = self.directory.stat().st_mode & 0o666  # mkdir follows the umask
        for name in sizes(self.directory):
            file = self.directory / name
            file.chmod(file.stat().st_mode & 0o777 | readable)
        make_durable(self.directory)
        old = self._beside("old")
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            os.rename(self.target, old)
        try:
            rename_durably(self.directory, self.target)
        except OSError:
            if old.exists() and not self.target.exists():
                os.rename(old, self.target)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def end(self) -> None:
        """Removes uncommitted content."""
        if self._lock >= 0:
            shutil.rmtree(self.directory, ignore_errors=True)
            self._release()

    def _beside(self, kind: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{kind}")

    def _release(self) -> None:
        if self._lock >= 0:
            self._beside("lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def make_durable(directory: Path) -> None:
    """Syncs all files and names of a tree, so that they survive a power cut."""
    for name in sizes(directory):
        sync(directory / name)
    sync_folders(directory)


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Writes `content` (JSON values) and the sizes of all files, after making these durable."""
    files = sizes(directory)
    make_durable(directory)
    write_atomically(directory / MANIFEST, json.dumps({**content, "files": files}, indent=1), durable=True)


def read_manifest(directory: Path, *, remedy: str = "", **expected: object) -> dict[str, Any]:
    """Returns what `write_manifest` wrote, after checking that the directory is complete.

    expected: keys and values that identify the directory's format
    remedy: end of the messages about an incomplete directory

    Raises MalformedFile, or Damaged if the manifest is missing, malformed or of another format, or a file of it is
    missing, truncated or outside of the directory.
    """
    marker, remedy = directory / MANIFEST, f"; {remedy}" if remedy else ""
    if not marker.is_file():
        raise Damaged(f"{directory} is incomplete: it has no file {MANIFEST!r}{remedy}")
    manifest = read_json(marker)
    if not isinstance(manifest, dict):
        raise Damaged(f"{marker} is not a list of files")
    if any(manifest.get(key) != value for key, value in expected.items()):
        found = " ".join(str(manifest.get(key)) for key in expected)
        here = " ".join(map(str, expected.values()))
        raise Damaged(f"{directory} has format {found}, and this version of mrl reads format {here}")
    try:
        files = {str(name): int(size) for name, size in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"{marker} is not a list of files ({error!r})") from error
    wrong = [problem for name, size in files.items() if (problem := _problem(directory, name, size))]
    if wrong:
        more = "; ..." if len(wrong) > MAX_LISTED else ""
        raise Damaged(f"{directory} is damaged: {'; '.join(wrong[:MAX_LISTED])}{more}{remedy}")
    return manifest


def require_space(target: Path, needed_bytes: int) -> None:
    """Raises Unwritable, with both sizes, if the disk of `target`'s parent has too little space."""
    needed, free = needed_bytes + SPARE_BYTES, shutil.disk_usage(target.parent).free
    if free < needed:
        raise Unwritable(f"not enough disk space for {target}: {size_text(needed)} needed, {size_text(free)} free")


def size_text(count: float) -> str:
    """Formats bytes with a unit, for example "1.5 GB"; units are powers of 1000."""
    units = ["bytes", "KB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.4g} {units[0]}"


def _problem(root: Path, name: str, size: int) -> str | None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        return f"{MANIFEST} names {name!r}, outside of the directory"
    if not (root / name).is_file():
        return f"{name} is missing"
    try:
        own_file(root, name)
    except ValueError as error:
        return str(error)
    found = (root / name).stat().st_size
    return None if found == size else f"{name} has {found} bytes instead of {size}"


def _locked(file: Path) -> int:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    if not lock(descriptor):
        os.close(descriptor)
        raise Unwritable(f"another process is writing there (it holds the lock {file}): wait until it ends, or stop it")
    return descriptor
