"""Errors of the weights package."""

from __future__ import annotations


class WeightError(RuntimeError):
    """Weights could not be read, written or matched; the message names file, tensor and rank."""


class SyncError(WeightError):
    """A weight sync failed. The engines' weights are undefined until a weight sync succeeds."""


class SyncMismatch(SyncError):
    """An engine does not hold what the trainer sent; the message names the tensors and both hashes."""
