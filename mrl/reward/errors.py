"""The errors of this room."""

from __future__ import annotations


class RewardError(RuntimeError):
    """Rewards cannot be had: a function does not load, a configuration or row does not fit, a pool has ended."""


class SampleError(RewardError):
    """A component failed on a sample, which the message names; others may be scored."""


class NoVerdict(SampleError, ValueError):
    """A built-in reward reached no verdict because of what the response says. The fault is neither the run's nor the
    row's, so the sample is left out even where `reward.on_error` is "stop": any model could end a run otherwise."""
