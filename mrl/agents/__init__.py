"""Agents: responses of several turns, between which an environment of the user's has its say. Workers start with this:
nothing is imported here."""
