"""Rewards: built-in functions, a user's own, and the processes that run them. Importable without torch."""

from mrl.reward.verl_managers import (
    DAPORewardManager,
    NaiveRewardManager,
    compute_reward,
    default_compute_score,
    load_reward_manager,
)

__all__ = ["DAPORewardManager", "NaiveRewardManager", "compute_reward", "default_compute_score", "load_reward_manager"]
