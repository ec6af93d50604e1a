"""Fault tolerance of a run: section timeouts, restarts, preemption warnings, stragglers."""

from mrl.resilience.protocol import EXIT_PREEMPTED

__all__ = ["EXIT_PREEMPTED"]
