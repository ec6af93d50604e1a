"""JSON from outside: what it holds, or in one sentence why it is none."""

from __future__ import annotations

import json
import re
from typing import Any

BOM = b"\xef\xbb\xbf"
MAX_ROW_BYTES = 64 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


DECODER = json.JSONDecoder(parse_constant=_no_number)


def parse(raw: bytes) -> Any:
    """The value. Raises ValueError for what is not UTF-8, no JSON, nested too deeply, or holds half a character."""
    try:
        value = DECODER.decode(raw.decode("utf-8"))
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{raw[error.start]:02x} at place {error.start + 1}") from error
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"holds {half}, half of a character (a lone surrogate), which is no text") from error
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    return value


def parse_row(raw: bytes) -> dict[str, Any]:
    """One object. Raises ValueError also for another value."""
    if len(raw) > MAX_ROW_BYTES:
        raise ValueError(f"a row of {len(raw) >> 20} MiB, at most {MAX_ROW_BYTES >> 20} MiB can be read")
    return as_row(parse(raw))


def as_row(value: Any) -> dict[str, Any]:
    """The value itself. Raises ValueError if it is no JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, not {type(value).__name__}")
    return value
