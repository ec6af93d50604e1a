"""Files that are whole or not there."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_atomically(file: Path, content: str | bytes) -> None:
    """Writes a temporary neighbour, then renames it."""
    data = content.encode() if isinstance(content, str) else content
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.rename(file)


def write_jsonl(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_atomically(file, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))


def append_jsonl(file: Path, row: dict[str, Any]) -> None:
    """One more line; half a line of a killed process is removed first. Not-a-number and infinities become text."""
    drop_torn_line(file)
    values = {name: str(v) if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
    with file.open("a") as handle:
        handle.write(json.dumps(values, allow_nan=False) + "\n")


def drop_torn_line(file: Path) -> None:
    """A killed run can leave half a line, on which the next one must not be glued."""
    if not file.is_file():
        return
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        with file.open("r+b") as handle:
            handle.truncate(data.rfind(b"\n") + 1)


def read_jsonl(file: Path) -> list[dict[str, Any]]:
    """All rows; a last line that is still being written is left out. No file: no rows."""
    if not file.is_file():
        return []
    lines = file.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]
