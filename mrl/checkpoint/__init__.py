"""Checkpoints of a run: complete or not there, loadable under another layout."""

from mrl.checkpoint.agreement import CheckpointError
from mrl.checkpoint.directory import latest, read, reading, step_of
from mrl.checkpoint.run import load
from mrl.checkpoint.saver import Saver, Written

__all__ = ["CheckpointError", "Saver", "Written", "latest", "load", "read", "reading", "step_of"]
