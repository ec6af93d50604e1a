"""Checkpoints of a run: atomic, and loadable under another layout."""

from mrl.checkpoint.agreement import CheckpointError
from mrl.checkpoint.directory import best_of, latest, name_best, of_step, read, reading, step_of
from mrl.checkpoint.run import Part, load, load_kept
from mrl.checkpoint.saver import Saver, Written

__all__ = [
    "CheckpointError",
    "Part",
    "Saver",
    "Written",
    "best_of",
    "latest",
    "load",
    "load_kept",
    "name_best",
    "of_step",
    "read",
    "reading",
    "step_of",
]
