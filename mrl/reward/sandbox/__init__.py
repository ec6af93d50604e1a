"""Sandbox for untrusted programs: limits, isolation and results. Standard library only."""

from mrl.reward.sandbox import groups
from mrl.reward.sandbox.isolate import SandboxError
from mrl.reward.sandbox.run import Limits, ProgramResult, converse_with_python, find_sandbox, run_python

__all__ = ["ProgramResult", "Limits", "SandboxError", "find_sandbox", "groups", "run_python", "converse_with_python"]
