"""What is scored, and what comes of it: plain values, which travel to worker processes and over HTTP."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One response. `prompt` is text: of a list of chat messages the last one's content (the row holds them all)."""

    prompt: str
    response: str
    row: dict[str, Any]
    response_tokens: int = 0
    token_ids: tuple[int, ...] = ()  # prompt and response


@dataclass(frozen=True)
class Outcome:
    """A component's score, and what else its function returned."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)


def settle(future: Future[Outcome], result: Outcome | Exception) -> None:
    """Unless it is settled already: the pool may be closed while an answer arrives."""
    with suppress(InvalidStateError):
        if isinstance(result, Outcome):
            future.set_result(result)
        else:
            future.set_exception(result)
