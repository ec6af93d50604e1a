"""Agents: multi-turn responses, with a user's environment between the turns. Workers import this first: it imports
nothing.
"""


class AgentError(RuntimeError):
    """The user's program, its process or the tokenisation of its words failed; never scored as the model's failure."""
