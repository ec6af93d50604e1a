"""Answers of engines: size limit of bodies, JSON, and checks of each field."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson

from mrl.inference.errors import BadAnswer

T = TypeVar("T")
MOST_TEXT = 2000  # characters of an engine's own words in an error
JSON_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    bool: "true or false",
}

_HTML = re.compile(r"\s*<(!doctype html|html)\b", re.IGNORECASE)
_PICTURE = re.compile(r"(;base64,)[\w+/=\\]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def from_json(content: bytes) -> Any:
    """Returns the JSON value of `content`. Raises BadAnswer if it is not JSON."""
    try:
        return orjson.loads(content)
    except ValueError:
        pass  # NaN and Infinity are no JSON: who reads the field says so
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is no JSON ({error}): {shown(content)}") from error


def typed(value: Any, what: str, kind: type[T]) -> T:
    """Returns `value` if it has exactly this type; else raises BadAnswer. what: name of the value for the message"""
    if type(value) is not kind:
        raise BadAnswer(f"{what} is {shown(value)}, expected {JSON_NAMES[kind]}")
    return value


def field(answer: Any, name: str, kind: type[T]) -> T:
    """Returns `answer[name]` if it has exactly this type; else raises BadAnswer."""
    if name not in typed(answer, "the answer", dict):
        raise BadAnswer(f"{name} is missing")
    return typed(answer[name], name, kind)


def maybe(answer: dict[str, Any], name: str, kind: type[T]) -> T | None:
    """Same as `field`, but returns None if the field is missing or null."""
    return None if answer.get(name) is None else typed(answer[name], name, kind)


def shown(value: Any) -> str:
    """Returns a short form of a value, however large it is."""
    return _SHORT.repr(value)


def error_message(content: bytes) -> str:
    """Returns the engine's error message, extracted from the known JSON forms."""
    return told(_words(content))


def told(words: str) -> str:
    """Returns an engine's message without the pictures that it may repeat and without control characters."""
    return _CONTROL.sub("?", _PICTURE.sub(r"\1...", words)[:MOST_TEXT])


def _words(content: bytes) -> str:
    try:
        answer = from_json(content)
    except BadAnswer:
        words = content.decode(errors="replace")
        return "an HTML page, from another service" if _HTML.match(words) else words
    if isinstance(answer, dict):
        error = answer.get("error")
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])
        for key in ("message", "error_message"):
            if key in answer:
                return str(answer[key])
    return str(answer)


PLAIN = {"Accept-Encoding": "identity"}  # of every request
MOST_BYTES = 256 << 20  # of an answer without samples; the longest has a hash of every parameter
AS_IT_IS = ("", "identity")


class Incoming:
    """Collects the parts of an answer's body. Raises BadAnswer for a compressed one: a few of its bytes may be more
    than the memory holds.

    headers: of the answer, by case-insensitive name
    """

    def __init__(self, headers: Mapping[str, str], most: int) -> None:
        if (encoding := headers.get("content-encoding", "")) not in AS_IT_IS:
            raise BadAnswer(f"the answer comes as {encoding!r:.40}, and was asked for as it is")
        self._most, self._size = most, 0
        self._parts: list[bytes] = []

    def take(self, part: bytes) -> None:
        """Adds a part; raises BadAnswer if there are more than `most` bytes then."""
        self._size += len(part)
        if self._size > self._most:
            raise BadAnswer(f"the answer has more than {self._most} bytes, which nothing that was asked for has")
        self._parts.append(part)

    @property
    def content(self) -> bytes:
        return b"".join(self._parts)
