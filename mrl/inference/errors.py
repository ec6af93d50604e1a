"""Errors of engines and of sampling."""

from __future__ import annotations


class EngineUnavailable(RuntimeError):
    """Raised if this machine cannot run the configured engine; the message says what to do."""


class EngineStartError(RuntimeError):
    """Raised if an engine did not start; the message has the end of its log."""


class PortTaken(EngineStartError):
    """Raised if another process has the engine's port; nothing was sent to it."""


class EngineError(RuntimeError):
    """Raised if a request to an engine failed. `status` is None if there was no HTTP answer."""

    def __init__(self, url: str, endpoint: str, status: int | None, text: str) -> None:
        self.url = url
        self.endpoint = endpoint
        self.status = status
        self.text = text
        answer = "no answer" if status is None else f"HTTP {status}"
        super().__init__(f"engine {url}: /{endpoint}: {answer}: {text}")

    def __reduce__(self) -> tuple[type[EngineError], tuple[str, str, int | None, str]]:
        return type(self), (self.url, self.endpoint, self.status, self.text)


class BadAnswer(ValueError):
    """Raised if an engine answered 200 with an invalid body."""


class Refused(BadAnswer):
    """Raised if the engine rejected the request (HTTP 4xx)."""


class RolloutError(RuntimeError):
    """Raised if sampling failed; the message names the engine, its exit code and the end of its log."""
