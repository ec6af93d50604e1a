"""A running engine that scores sequences by its own weights: log-probs of given tokens, and its most likely ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mrl.inference.access import Access
from mrl.inference.answers import field, shown
from mrl.inference.client import EngineClient
from mrl.inference.errors import BadAnswer, EngineError, EngineStartError
from mrl.inference.protocol import GENERATE, ModelInfo
from mrl.inference.samples import scoring_body

T = TypeVar("T")
AGAIN_S = 1.0
NO_TOKEN, NEVER = -1, -1e4  # ids and log-probs of a row with fewer tokens


@dataclass(frozen=True)
class ScoredTokens:
    """Log-probs at temperature 1 of n consecutive tokens, and the engine's k most likely tokens at their positions.

    log_probs [n] float32; top_ids [n, k] int64, -1 where there are fewer; top_log_probs [n, k] float32
    """

    log_probs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_log_probs: NDArray[np.float32]


class TeacherEngine:
    """An engine that scores sequences. Close it after use.

    Args:
        concurrent_requests: sequences in flight at once.
        timeout_s: maximum seconds until one sequence is scored; until then an engine that does not answer is asked
            again.
    """

    def __init__(self, url: str, access: Access, concurrent_requests: int, timeout_s: float) -> None:
        self._client = EngineClient(url, timeout_s, access)
        self._threads = ThreadPoolExecutor(concurrent_requests, "teacher")
        self._timeout_s = timeout_s
        self._is_closed = threading.Event()

    def close(self) -> None:
        """Waits for requests in flight, none of which is repeated, and closes the connections."""
        self._is_closed.set()
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def check(self, key: str, path: str, model_type: str, tokens: int) -> ModelInfo:
        """Checks that the engine serves a model of this type and has room for so many tokens; returns what it serves.

        key: the section of the teacher, for messages
        Raises EngineError if it does not answer, EngineStartError if it does not suit.
        """
        url = self._client.url
        info = self._answered(lambda limit_s: self._client.model_info())
        if info.model_type != model_type:
            raise EngineStartError(
                f"teacher {url} serves {info.model_path}, a {info.model_type} model, and {path} is a {model_type} "
                f"model: set {key}.path to the directory of the served model, or correct {key}.url"
            )
        room = self._client.server_info().room
        if room is not None and room < tokens:
            raise EngineStartError(
                f"teacher {url} has room for {room} tokens of prompt and response together, and the run may ask for "
                f"{tokens}: start it with a longer context"
            )
        return info

    def score(self, sequences: Sequence[tuple[list[int], int]], top_k: int) -> Iterator[ScoredTokens]:
        """Requests the scores of all sequences at once and returns them in order.

        Args:
            sequences: (token ids, index of the first token to score, at least 1).
            top_k: most likely tokens for each position; 0: none.

        Raises EngineError, with the engine's URL, for a refusal, an unusable answer, or none within the time-out.
        """
        return self._threads.map(lambda each: self._score(each[0], each[1], top_k), sequences)

    def _score(self, ids: list[int], first: int, top_k: int) -> ScoredTokens:
        body = scoring_body(ids, first - 1, top_k)
        answer = self._answered(lambda limit_s: self._client.generate(body, limit_s))
        try:
            return read_scores(answer, ids[first:], top_k)
        except BadAnswer as error:
            raise EngineError(self._client.url, GENERATE.name, 200, str(error)) from error

    def _answered(self, ask: Callable[[float], T]) -> T:
        """Returns the answer to `ask`, which gets the seconds that are left, and is asked again while the engine does
        not answer."""
        end = time.monotonic() + self._timeout_s
        while True:
            try:
                return ask(max(AGAIN_S, end - time.monotonic()))
            except EngineError as error:
                is_refused = error.status is not None and error.status < 500
                is_late = time.monotonic() + AGAIN_S > end
                if is_refused:
                    raise
                if is_late or self._is_closed.wait(AGAIN_S):
                    limit = f"teacher.timeout_s = {self._timeout_s:g} s"
                    raise EngineError(error.url, error.endpoint, error.status, f"{error.text} ({limit})") from error


def read_scores(answer: Any, tokens: list[int], top_k: int) -> ScoredTokens:
    """Returns the scores in an answer to `scoring_body`, whose first entry is that of the token before `tokens`.

    Raises BadAnswer if there are others than those of `tokens`, or a log-prob is no number.
    """
    info = field(answer, "meta_info", dict)
    rows = field(info, "input_token_logprobs", list)[1:]
    top = field(info, "input_top_logprobs", list)[1:] if top_k else []
    ids = np.full((len(rows), top_k), NO_TOKEN, dtype=np.int64)
    log_probs = np.full((len(rows), top_k), NEVER, dtype=np.float32)
    try:
        asked, found = [row[1] for row in rows], np.array([row[0] for row in rows], dtype=np.float32)
        for number, row in enumerate(top):
            ids[number, : len(row)] = [entry[1] for entry in row]
            log_probs[number, : len(row)] = [entry[0] for entry in row]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        text = f"input_token_logprobs or input_top_logprobs cannot be read ({error}): {shown(info)}"
        raise BadAnswer(text) from error
    if asked != tokens:
        raise BadAnswer(f"input_token_logprobs has {len(rows)} tokens, which are not the {len(tokens)} that were asked")
    if top_k and len(top) != len(rows):
        raise BadAnswer(f"input_top_logprobs has {len(top)} rows, and input_token_logprobs {len(rows)}")
    if not (np.isfinite(found).all() and (np.isfinite(log_probs) | (log_probs == -np.inf)).all()):
        raise BadAnswer(f"a log-prob of the tokens {shown(tokens)} is not a number")
    return ScoredTokens(found, ids, log_probs.clip(NEVER))
