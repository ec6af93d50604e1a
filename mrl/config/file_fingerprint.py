"""Fingerprints of model directories and Python files, from a few reads, to detect changed contents on resume."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
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
    files = _of_model(path) if path.is_dir() else _with_imports(path) if path.suffix == ".py" else [path]
    files = [file for file in files if file.is_file()]
    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(_outlined, files))
    return {str(file.relative_to(folder)): text for file, text in zip(files, found, strict=True)}


def changed_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Returns the names of files that changed, are new, or are missing."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _of_model(folder: Path) -> list[Path]:
    names = (file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.suffix in OF_MODELS)
    return [folder / name for name in names if not any(part.startswith((".", "cache-")) for part in name.parts)]


def _outlined(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_size} bytes, digest {_digest(file, stat.st_size, stat.st_mtime_ns)}"


@cache
def _digest(file: Path, size: int, mtime_ns: int) -> str:
    """Hashes a file; cached until its size or modification time changes."""
    found = hashlib.blake2b(digest_size=16)
    with file.open("rb") as contents:
        if size <= WHOLE:
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
            left += [of for name in _imported(one) for of in _of_module(file.parent / name)]
    return found


def _of_module(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def _imported(file: Path) -> Iterator[str]:
    """Yields the top-level names of imported modules, except mrl; nothing for a file that cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [node.module]
        yield from (first for name in names if (first := name.partition(".")[0]) != "mrl")
