"""Inputs and outcomes of scoring: plain values, which are sent to worker processes and over HTTP."""

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
class ScoreRequest:
    """One response to score. `prompt` is text: for a list of chat messages the last one's content (the row holds them
    all).
    """

    prompt: str
    response: str
    row: dict[str, Any]
    response_tokens: int = 0
    sample: Sample | None = field(default=None, compare=False, repr=False)  # for models; functions do not get it
    image: np.ndarray | None = field(default=None, compare=False)  # [channels, height, width] uint8, in place of text
    pictures: tuple[bytes, ...] | None = None  # images of the prompt, as PNG; None: not requested

    @property
    def token_ids(self) -> list[int]:
        """Token ids of prompt and response for a text-only model, with one image token an image."""
        return (
            []
            if self.sample is None
            else [*self.sample.request.prompt.text_token_ids, *self.sample.response_ids.tolist()]
        )


@dataclass(frozen=True)
class Outcome:
    """A component's score, and further values that its function returned."""

    score: float
    parts: dict[str, float] = field(default_factory=dict)


def set_outcome(future: Future[Outcome], result: Outcome | Exception) -> None:
    """Sets the result of a future unless it has one: the pool may be closed while an answer arrives."""
    with suppress(InvalidStateError):
        if isinstance(result, Outcome):
            future.set_result(result)
        else:
            future.set_exception(result)


class PendingScores:
    """Futures of samples that are not yet scored. After `end` there are no new ones, and all raise its error."""

    def __init__(self) -> None:
        self.ended: Exception | None = None
        self._lock = Lock()
        self._futures: dict[int, Future[Outcome]] = {}

    def new(self) -> Future[Outcome]:
        """Returns a future for one more sample. Raises the error of `end` if that has been called."""
        future: Future[Outcome] = Future()
        with self._lock:
            if self.ended is not None:
                raise self.ended
            self._futures[id(future)] = future
        future.add_done_callback(self._forget)
        return future

    def end(self, error: Exception) -> None:
        """Fails all futures with `error`; after several calls, new futures raise the first error."""
        with self._lock:
            self.ended = self.ended or error
            futures = list(self._futures.values())
        for future in futures:
            set_outcome(future, error)

    def _forget(self, future: Future[Outcome]) -> None:
        with self._lock:
            self._futures.pop(id(future), None)
