"""Errors of the reward package."""

from __future__ import annotations


class RewardError(RuntimeError):
    """Rewards are unavailable: a function does not load, a configuration or row does not fit, or a pool has ended."""


class SampleError(RewardError):
    """A component failed on a sample, which the message names; other samples may be scored."""


class NoVerdict(SampleError, ValueError):
    """A built-in reward reached no verdict because of the response's content. Neither the run nor the row is at fault,
    so the sample is left out even if `reward.on_error` is "stop": otherwise any model could end a run.
    """
