"""Agents: multi-turn responses, with an environment between the turns. It imports nothing: workers start with it."""


class AgentError(RuntimeError):
    """The user's program, its process or the tokenisation of its words failed; never scored as the model's failure."""
