"""What engines answer is JSON of somebody else's making: nothing in it is believed before it has been looked at."""

from __future__ import annotations

import json
import reprlib
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
MOST_TEXT = 2000  # characters of an engine's own words in an error


@dataclass(frozen=True)
class ModelInfo:
    """What an engine says it serves."""

    model_path: str
    model_type: str
    weight_version: str


@dataclass(frozen=True)
class RankChecksums:
    """One engine process: its tensor-parallel rank and the hash of each of its own (fused, sharded) parameters."""

    tp_rank: int
    tp_size: int
    checksums: dict[str, str]


class BadAnswer(ValueError):
    """The engine answered 200 with something that is not what was asked for."""


def from_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is no JSON ({error}): {shown(content)}") from error


def typed(value: Any, what: str, kind: type[T]) -> T:
    """`value`, which must be of exactly this type."""
    if type(value) is not kind:
        raise BadAnswer(f"{what} is {shown(value)}, expected {JSON_NAMES[kind]}")
    return value


def field(answer: Any, name: str, kind: type[T]) -> T:
    """`answer[name]`, of exactly this type."""
    if name not in typed(answer, "the answer", dict):
        raise BadAnswer(f"{name} is missing")
    return typed(answer[name], name, kind)


JSON_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}


def shown(value: Any) -> str:
    """In a few words, however large it is."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def read_model_info(answer: Any) -> ModelInfo:
    return ModelInfo(*(field(answer, name, str) for name in ("model_path", "model_type", "weight_version")))


def read_checksums(answer: Any) -> list[RankChecksums]:
    found = []
    for rank in field(answer, "ranks", list):
        checksums = field(rank, "checksums", dict)
        info = rank.get("parallelism_info")
        place = info[0] if isinstance(info, list) and info else info
        if not set(map(type, checksums.values())) <= {str}:
            raise BadAnswer(f"checksums is {shown(checksums)}, expected texts by name")
        found.append(RankChecksums(field(place, "tp_rank", int), field(place, "tp_size", int), checksums))
    return sorted(found, key=lambda rank: rank.tp_rank)


def error_message(content: bytes) -> str:
    """The engine's own words, out of its JSON forms where it used one."""
    try:
        answer = from_json(content)
    except BadAnswer:
        return content.decode(errors="replace")[:MOST_TEXT]
    if isinstance(answer, dict):
        error = answer.get("error")
        if isinstance(error, dict) and "message" in error:
            return str(error["message"])[:MOST_TEXT]
        if "message" in answer:
            return str(answer["message"])[:MOST_TEXT]
    return str(answer)[:MOST_TEXT]
