"""JSON from outside: what it holds, or in one sentence why it is none."""

from __future__ import annotations

from typing import Any

from mrl import strict_json

BOM = b"\xef\xbb\xbf"
MAX_ROW_BYTES = 64 << 20


def parse(raw: bytes) -> Any:
    """The value. Raises ValueError for what is no JSON by `mrl.strict_json`."""
    try:
        return strict_json.loads(raw)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error


def parse_row(raw: bytes) -> dict[str, Any]:
    """One object. Raises ValueError also for another value."""
    if len(raw) > MAX_ROW_BYTES:
        raise ValueError(f"the row has {len(raw) >> 20} MiB; the limit is {MAX_ROW_BYTES >> 20} MiB")
    return as_row(parse(raw))


def as_row(value: Any) -> dict[str, Any]:
    """The value itself. Raises ValueError if it is no JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, not {type(value).__name__}")
    return value
