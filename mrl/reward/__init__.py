"""Rewards: built-in functions, a user's own, and the processes that run them. Importable without torch."""

from mrl.reward.errors import RewardError
from mrl.reward.pool import RewardPool

__all__ = ["RewardError", "RewardPool"]
