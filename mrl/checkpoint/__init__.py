"""Checkpoints of a run: complete or not there, loadable under another layout."""

from mrl.checkpoint.agreement import CheckpointError
from mrl.checkpoint.directory import latest
from mrl.checkpoint.run import load, save

__all__ = ["CheckpointError", "latest", "load", "save"]
