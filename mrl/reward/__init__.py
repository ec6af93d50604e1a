"""Rewards: built-in functions, a user's own, and the processes that run them. Importable without torch."""

from mrl.reward.errors import RewardError
from mrl.reward.manager import RewardManager, longest_wait_s

__all__ = ["RewardError", "RewardManager", "longest_wait_s"]
