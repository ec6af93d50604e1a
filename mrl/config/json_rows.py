"""Rows from outside mrl, with one-sentence errors: parsed JSON, and rows that a library makes by a name."""

from __future__ import annotations

from typing import Any

from mrl import strict_json
from mrl.config import reasoning_tasks, verifiers_environments

BOM = b"\xef\xbb\xbf"
MAX_ROW_BYTES = 64 << 20


def parse(raw: bytes) -> Any:
    """Returns the parsed value. Raises ValueError if `mrl.strict_json` rejects it."""
    try:
        return strict_json.loads(raw)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def parse_row(raw: bytes) -> dict[str, Any]:
    """Returns one parsed JSON object. Raises ValueError for invalid JSON, another type, or more than MAX_ROW_BYTES."""
    if len(raw) > MAX_ROW_BYTES:
        raise ValueError(f"the row has {len(raw) >> 20} MiB; the limit is {MAX_ROW_BYTES >> 20} MiB")
    return as_row(parse(raw))


def as_row(value: Any) -> dict[str, Any]:
    """Returns the value unchanged. Raises ValueError if it is not a JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, not {type(value).__name__}")
    return value


def is_name(path: str) -> bool:
    """Returns True if a data source is not a path, but names rows of a library."""
    return reasoning_tasks.is_task(path) or verifiers_environments.is_environment(path)


def named_rows(name: str, split: str | None) -> list[dict[str, Any]]:
    """Returns the rows of a name. Raises ValueError, which says what is wrong with it."""
    if reasoning_tasks.is_task(name):
        return reasoning_tasks.rows(name)
    return verifiers_environments.rows(name, split)
