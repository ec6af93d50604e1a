"""Why a rollout ends."""

from __future__ import annotations

from mrl.rollout.answers import BadAnswer


class RolloutError(RuntimeError):
    """A rollout could not be finished; the message names the engine, its end and the end of its log."""


class Refused(BadAnswer):
    """The engine found fault with the request (HTTP 4xx): its answer says it all, its log adds nothing."""
