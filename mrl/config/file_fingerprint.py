"""Fingerprints of model directories and Python files, from a few reads, to detect changed contents on resume."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

# suffixes of files in a model directory that affect the model; README and logs do not
OF_MODELS = (".json", ".safetensors", ".bin", ".pt", ".distcp", ".jinja", ".model", ".txt")
WHOLE = 64 << 20  # bytes; files up to this size are read completely
HEAD, PLACES, PIECE = 1 << 20, 64, 4096  # larger files: HEAD bytes, then PLACES pieces of PIECE bytes up to the end
READERS = 8  # files read concurrently


def file_of(spec: str | None) -> str:
    """Returns the path in `path/to/file.py:name`; empty for the name of a built-in."""
    return (spec or "").rpartition(":")[0]


def fingerprint(path: Path) -> dict[str, str]:
    """Returns file -> size and digest, independent of modification times; empty if the path does not exist.

    A model directory: files with the suffixes OF_MODELS. A Python file: the file and the modules of its folder that it
    imports, directly or indirectly.

    The digest of a large file covers samples of it. Another model with equal shapes is detected, but a change of a few
    rows of one tensor may not be.
    """
    folder = path if path.is_dir() else path.parent
    files = [path] if path.is_file() else []
    if path.is_dir():
        files = [file for file in files_below(path) if file.suffix in OF_MODELS]
    elif path.suffix == ".py":
        files = _with_imports(path)
    return {
        str(file.relative_to(folder)): f"{file.stat().st_size} bytes, digest {digest}"
        for file, digest in zip(files, digests(files), strict=True)
    }


def changed_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Returns the names of files that changed, are new, or are missing."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def files_below(folder: Path) -> list[Path]:
    """Returns the files of a folder and its subfolders, sorted, except hidden ones and caches."""
    names = (file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file())
    return [folder / name for name in names if not any(part.startswith((".", "cache-")) for part in name.parts)]


def digests(files: Sequence[Path], whole: bool = False) -> list[str]:
    """Returns the digest of each file; of a large one, samples are read unless `whole`."""

    def digest(file: Path) -> str:
        stat = file.stat()
        return _digest(file, stat.st_size, stat.st_mtime_ns, whole)

    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(digest, files))


@cache
def _digest(file: Path, size: int, mtime_ns: int, whole: bool) -> str:
    """Hashes a file; cached until its size or modification time changes."""
    found = hashlib.blake2b(digest_size=16)
    with file.open("rb") as contents:
        if whole or size <= WHOLE:
            return hashlib.file_digest(contents, lambda: found).hexdigest()
        found.update(contents.read(HEAD))
        for place in range(1, PLACES + 1):
            contents.seek(HEAD + (size - PIECE - HEAD) * place // PLACES)
            found.update(contents.read(PIECE))
    return found.hexdigest()


def _with_imports(file: Path) -> list[Path]:
    """Returns the file and the modules of its folder (first on sys.path) that it imports, directly or indirectly."""
    found: list[Path] = []
    left = [file]
    while left:
        one = left.pop()
        if one not in found and one.is_file():
            found.append(one)
            for path in (file.parent / name for name in _imported(one)):
                left += sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return found


def _imported(file: Path) -> Iterator[str]:
    """Yields the top-level names of imported modules, except mrl; nothing for a file that cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module]
        yield from (first for name in names if (first := name.partition(".")[0]) != "mrl")
