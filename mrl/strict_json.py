"""Strict JSON of RFC 8259, without the extensions of Python's json module, in both directions.

Rejected are NaN and Infinity, numbers such as 1e999 that no float holds, duplicate keys, lone surrogates, and nesting
that is too deep. Standard library only.
"""

from __future__ import annotations

import json
import math
from typing import Any


def loads(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError, in one sentence, for anything else."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1}") from None
    start = len(text) - len(text.lstrip(" \t\r\n"))
    value, end = raw_decode(text, start)
    if rest := text[end:].strip(" \t\r\n"):
        raise json.JSONDecodeError(f"extra text {rest[:20]!r}", text, text.index(rest, end))
    return value


def raw_decode(text: str, start: int) -> tuple[Any, int]:
    """Returns the JSON value that begins at index `start`, and the index after its last character.

    Raises ValueError; for invalid JSON a JSONDecodeError with the index (`pos`).
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        if "\\u" in text[start:end]:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, start) from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise json.JSONDecodeError(f"{half} is half of a character (a lone surrogate)", text, start) from None
    except ValueError as error:  # from the hooks below, or integers with more than 4300 digits
        raise json.JSONDecodeError(str(error), text, start) from None
    return value, end


def dumps(value: Any, **options: Any) -> str:
    """Returns the JSON text of a value; options are those of `json.dumps`. Raises ValueError for NaN, an infinity or a
    cycle, TypeError for a value without a JSON form."""
    return json.dumps(value, allow_nan=False, **options)


def finite(value: Any) -> Any:
    """Returns the same value with the texts "nan", "inf" and "-inf" for floats that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    return [finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:40]} is larger than any float")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object's content, as `object_pairs_hook`. Raises ValueError for a duplicate key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:80]!r} occurs twice")
            seen.add(name)
    return content


_DECODER = json.JSONDecoder(parse_float=_float, parse_constant=_constant, object_pairs_hook=unique_keys)
