"""The errors of this room."""

from __future__ import annotations


class RewardError(RuntimeError):
    """Rewards cannot be had: a function does not load, a configuration or row does not fit, a pool has ended."""


class SampleError(RewardError):
    """A component failed on a sample, which the message names; others may be scored."""
