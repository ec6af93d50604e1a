"""Algorithms as pure tensor functions, each kind in a registry by name. Knows tensors only: no mesh, no config."""

from mrl.algo import advantages, aggregate, group_advantages, kl, policy_loss, token_rewards, value_loss
from mrl.algo.stats import explained_variance, whiten

__all__ = [
    "advantages",
    "aggregate",
    "explained_variance",
    "group_advantages",
    "kl",
    "policy_loss",
    "token_rewards",
    "value_loss",
    "whiten",
]
