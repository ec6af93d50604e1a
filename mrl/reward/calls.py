"""What is scored, and what comes of it: plain values, which travel to worker processes and over HTTP."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np  # workers do without

    from mrl.core import Sample


@dataclass(frozen=True)
class Call:
    """One response. `prompt` is text: of a list of chat messages the last one's content (the row holds them all)."""

    prompt: str
    response: str
    row: dict[str, Any]
    response_tokens: int = 0
    sample: Sample | None = field(default=None, compare=False, repr=False)  # for models; functions do not get it
    image: np.ndarray | None = field(default=None, compare=False)  # [channels, height, width] uint8, in place of text
    pictures: tuple[bytes, ...] | None = None  # of the prompt, as PNG; None: nobody asks for them

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response, as a model of text alone is told them: with one image token a picture."""
        return [] if self.sample is None else [*self.sample.request.prompt.told_ids, *self.sample.response_ids.tolist()]


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


class Unsettled:
    """The futures of what is still to be scored. After `end` there are no new ones, and all raise its error."""

    def __init__(self) -> None:
        self.ended: Exception | None = None
        self._lock = Lock()
        self._futures: dict[int, Future[Outcome]] = {}

    def new(self) -> Future[Outcome]:
        """A future for one more sample. Raises what `end` was given, if that has been called."""
        future: Future[Outcome] = Future()
        with self._lock:
            if self.ended is not None:
                raise self.ended
            self._futures[id(future)] = future
        future.add_done_callback(self._forget)
        return future

    def end(self, error: Exception) -> None:
        """The first error stays."""
        with self._lock:
            self.ended = self.ended or error
            futures = list(self._futures.values())
        for future in futures:
            settle(future, error)

    def _forget(self, future: Future[Outcome]) -> None:
        with self._lock:
            self._futures.pop(id(future), None)
