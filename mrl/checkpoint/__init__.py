"""Checkpoints of a run: atomic, and loadable under another layout."""

from mrl.checkpoint.agreement import CheckpointError
from mrl.checkpoint.directory import best_of, hold_for_reading, latest, link_best, read, step_number, step_path
from mrl.checkpoint.run import Checkpointable, load, load_samples
from mrl.checkpoint.saver import SavedCheckpoint, Saver

__all__ = [
    "CheckpointError",
    "Checkpointable",
    "Saver",
    "SavedCheckpoint",
    "best_of",
    "latest",
    "load",
    "load_samples",
    "link_best",
    "step_path",
    "read",
    "hold_for_reading",
    "step_number",
]
