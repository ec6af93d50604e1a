"""The one error of this room."""

from __future__ import annotations


class RewardError(RuntimeError):
    """A reward function could not be loaded, or failed on a sample that the message names."""
