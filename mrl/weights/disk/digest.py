"""SHA-256 of the files that hold a model's weights, as `sha256sum` prints them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

READERS = 4  # files at once
PATTERNS = ("*.safetensors", "pytorch_model*.bin")


def weight_files(model: Path) -> list[Path]:
    """Returns the weight files of a Hugging Face directory: safetensors or, without any, pickles."""
    return next((found for pattern in PATTERNS if (found := sorted(model.glob(pattern)))), [])


def file_digests(files: list[Path]) -> dict[str, str]:
    """Returns 64 hex digits by file name. Takes about a second for 1.5 GB; unchanged files are cached."""
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda file: _digest(file, file.stat().st_size, file.stat().st_mtime_ns), files)
        return {file.name: digest for file, digest in zip(files, found, strict=True)}


def whole_digest(digests: Mapping[str, str]) -> str:
    """Returns one digest for all files: the digest of a single file, or that of the output of `sha256sum *.safetensors`
    for several; empty for none.
    """
    if len(digests) < 2:
        return next(iter(digests.values()), "")
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@cache
def _digest(file: Path, size: int, mtime_ns: int) -> str:
    with file.open("rb") as contents:
        return hashlib.file_digest(contents, "sha256").hexdigest()
