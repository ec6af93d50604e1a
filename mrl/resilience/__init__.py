"""What lets a run outlive faults: sections that are watched, restarts, a scheduler's warning, slow ranks."""

from mrl.resilience.protocol import EXIT_PREEMPTED

__all__ = ["EXIT_PREEMPTED"]
