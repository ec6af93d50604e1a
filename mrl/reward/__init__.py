"""Rewards: built-in functions, a user's own, and the processes that run them. Importable without torch."""
