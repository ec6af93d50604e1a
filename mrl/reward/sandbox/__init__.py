"""Sandbox for untrusted programs: limits, isolation and results. Standard library only."""

from mrl.reward.sandbox import groups
from mrl.reward.sandbox.isolate import SandboxError
from mrl.reward.sandbox.run import Ended, Limits, found, run_python, talk_to_python

__all__ = ["Ended", "Limits", "SandboxError", "found", "groups", "run_python", "talk_to_python"]
