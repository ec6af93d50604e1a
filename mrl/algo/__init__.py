"""Algorithms as pure tensor functions, each kind in a registry by name.

The package depends on no mesh and no config.
"""

from mrl.algo import (
    advantages,
    aggregate,
    core,
    custom,
    group_advantages,
    kl,
    log_probs,
    off_policy_mask,
    policy_loss,
    policy_loss_covariance,
    policy_loss_fused,
    policy_loss_sequence,
    policy_loss_token,
    preference,
    preference_unpaired,
    resampling,
    reward_losses,
    rollout_correction,
    token_baseline,
    token_choice,
    token_rewards,
    value_loss,
)
from mrl.algo.flat import FlatBatch
from mrl.algo.sequences import Sequences
from mrl.algo.stats import explained_variance, whiten

__all__ = [
    "FlatBatch",
    "Sequences",
    "advantages",
    "aggregate",
    "core",
    "explained_variance",
    "group_advantages",
    "kl",
    "log_probs",
    "off_policy_mask",
    "custom",
    "policy_loss",
    "policy_loss_covariance",
    "policy_loss_fused",
    "policy_loss_sequence",
    "policy_loss_token",
    "preference",
    "preference_unpaired",
    "resampling",
    "reward_losses",
    "rollout_correction",
    "token_baseline",
    "token_choice",
    "token_rewards",
    "value_loss",
    "whiten",
]
