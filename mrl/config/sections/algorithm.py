"""Advantages and losses."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from mrl.config.sections.policy import PolicyLossConfig, RolloutCorrectionConfig


class KLConfig(Section):
    use_in_reward: bool = False
    use_in_loss: bool = False
    penalty: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"  # "+": with k2's gradient, in the loss
    coef: NonNegativeFloat = 0.0
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: PositiveFloat | None = None  # adaptive only
    horizon_samples: PositiveInt | None = None  # adaptive only


class ValueLossConfig(Section):
    cliprange_value: PositiveFloat = 0.5
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"


class AlgorithmConfig(Section):
    adv_estimator: Literal[
        "gae", "grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ]
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    norm_adv_by_std_in_grpo: bool = True
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    kl: KLConfig = KLConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    ratio_threshold: PositiveFloat | None = None  # a mini-batch whose mean ratio is above has its actor loss times 0
    target_kl: PositiveFloat | None = None  # no further epoch after one whose last ppo_kl is above 1.5 x this
    value_loss: ValueLossConfig = ValueLossConfig()
