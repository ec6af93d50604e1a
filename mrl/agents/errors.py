"""What goes wrong with agents that is not the model's fault."""

from __future__ import annotations


class AgentError(RuntimeError):
    """The user's program, its process or the tokens of its words; never scored as if the model had failed."""
