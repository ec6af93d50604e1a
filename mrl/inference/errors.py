"""Why an engine, or a rollout, fails."""

from __future__ import annotations


class EngineUnavailable(RuntimeError):
    """This machine cannot run the engine that the configuration asks for; the message says what to do."""


class EngineStartError(RuntimeError):
    """An engine did not come up; the message holds the end of its log."""


class PortTaken(EngineStartError):
    """Another process listens where the engine was to be; nothing was sent to it."""


class EngineError(RuntimeError):
    """An engine did not do what it was asked. `status` is None when there was no HTTP answer at all."""

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
    """The engine answered 200 with something that is not what was asked for."""


class Refused(BadAnswer):
    """The engine found fault with the request (HTTP 4xx): its answer says it all, its log adds nothing."""


class RolloutError(RuntimeError):
    """A rollout could not be finished; the message names the engine, its end and the end of its log."""
