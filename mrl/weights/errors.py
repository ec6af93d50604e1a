"""Errors of the weight room."""

from __future__ import annotations


class WeightError(RuntimeError):
    """Weights could not be read, written or matched; the message names file, tensor and rank."""


class SyncError(WeightError):
    """A push of weights failed. The engines' weights are undefined until a push succeeds."""


class SyncMismatch(SyncError):
    """An engine does not hold what the trainer sent; the message names the tensors and both hashes."""
