"""What files and directories of a model's size hold, as far as a few reads tell: enough to notice other contents."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

# of a model's directory, whoever has written it; not its README, logs and lists
OF_MODELS = (".json", ".safetensors", ".bin", ".pt", ".distcp", ".jinja", ".model", ".txt")
WHOLE = 64 << 20  # bytes: files up to here are read to their end
HEAD, PLACES, PIECE = 1 << 20, 64, 4096  # of longer ones: the beginning, and so many pieces from there to the end
READERS = 8  # files at once


def file_of(spec: str | None) -> str:
    """Of `path/to/file.py:name`; empty for a built-in's name."""
    return (spec or "").rpartition(":")[0]


def fingerprint(path: Path) -> dict[str, str]:
    """File -> its size and a digest, whatever its time: of a model's directory those of OF_MODELS, of a Python file its
    own and those of its folder that it imports. Empty for what is not there.

    Of long files a digest of pieces: another model of equal shapes differs in some, one that differs in a few rows of
    one tensor may not.
    """
    folder = path if path.is_dir() else path.parent
    files = _of_model(path) if path.is_dir() else _with_imports(path) if path.suffix == ".py" else [path]
    files = [file for file in files if file.is_file()]
    with ThreadPoolExecutor(READERS) as pool:
        found = list(pool.map(_outlined, files))
    return {str(file.relative_to(folder)): text for file, text in zip(files, found, strict=True)}


def changed_files(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """The files that differ, are new, or are gone."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _of_model(folder: Path) -> list[Path]:
    names = (file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.suffix in OF_MODELS)
    return [folder / name for name in names if not any(part.startswith((".", "cache-")) for part in name.parts)]


def _outlined(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_size} bytes, digest {_digest(file, stat.st_size, stat.st_mtime_ns)}"


@cache
def _digest(file: Path, size: int, mtime_ns: int) -> str:
    """Read once as long as the file has this size and time."""
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
    """The file, what it imports of its own folder (which is first on sys.path), and what that imports."""
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
    """The first parts of names but mrl's own; nothing of what cannot be read."""
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
