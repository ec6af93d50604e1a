"""Errors of agents that are not the model's fault."""

from __future__ import annotations


class AgentError(RuntimeError):
    """Failure of the user's program, its process or the tokenisation of its words; never scored as a failure of the
    model.
    """
