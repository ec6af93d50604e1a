"""Load of the engines: concurrent requests and the speed of answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mrl.core import Sample


@dataclass(frozen=True)
class Load:
    """Load over a span of time."""

    requests: int  # begun
    samples: int  # finished
    tokens: int  # response tokens of the finished samples
    seconds: float  # with at least one request
    mean: float  # of concurrent requests during these seconds
    most: int  # concurrent requests

    @property
    def tokens_per_s(self) -> float:
        """Response tokens per second, during seconds with any request."""
        return self.tokens / max(self.seconds, 1e-9)


class Meter:
    """Counts requests in progress; thread-safe. now: monotonic clock"""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.running = self._most = 0
        self._now, self._since = now, now()
        self._lock = threading.Lock()  # samples may be drawn in one thread while another one takes the counts
        self._clear()

    def begin(self, requests: int) -> None:
        with self._lock:
            self._pass()
            self.running += requests
            self._requests += requests
            self._most = max(self._most, self.running)

    def end(self, requests: int, samples: Sequence[Sample] = ()) -> None:
        tokens = sum(len(sample.response_ids) for sample in samples)
        with self._lock:
            self._pass()
            self.running -= requests
            self._samples += len(samples)
            self._tokens += tokens

    def take(self) -> Load:
        """Returns the load since the last call."""
        with self._lock:
            self._pass()
            mean = self._waited / self._busy if self._busy else 0.0
            found = Load(self._requests, self._samples, self._tokens, self._busy, mean, self._most)
            self._clear()
        return found

    def _clear(self) -> None:
        self._requests = self._samples = self._tokens = 0
        self._busy = self._waited = 0.0
        self._most = self.running

    def _pass(self) -> None:
        now = self._now()
        if self.running:
            self._busy += now - self._since
            self._waited += self.running * (now - self._since)
        self._since = now
