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


AdvEstimator = Literal[
    "gae",
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "gpg",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
]


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing are dropped, and others sampled for them."""

    enable: bool = False  # drop the groups in which every response has the same `metric`
    metric: str = "score"  # or a component of the reward
    function: str | None = None  # path/to/file.py:name, f(responses of a group) -> bool: keep it?
    prompts_per_round: PositiveInt | None = None  # sampled at once; batch.prompts_per_step when null
    max_num_gen_batches: PositiveInt = 10  # rounds a step
    on_shortage: Literal["stop", "fill"] = "stop"  # when they were too few: end the run, or take dropped groups too

    @property
    def is_on(self) -> bool:
        return self.enable or self.function is not None


class AlgorithmConfig(Section):
    adv_estimator: AdvEstimator
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    norm_adv_by_std_in_grpo: bool = True
    whiten_advantages: bool = True
    gdpo_reward_keys: tuple[str, ...] = ()  # components of the reward, "score" among them if it is one
    gdpo_reward_weights: tuple[float, ...] | None = None  # all 1 when null
    use_score_scaling: bool = False  # divide scores by the running standard deviation of all scores so far
    use_score_norm: bool = False  # and subtract their running mean
    score_clip: PositiveFloat | None = None  # then clip to +- this
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    kl: KLConfig = KLConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    ratio_threshold: PositiveFloat | None = None  # a mini-batch whose mean ratio is above has its actor loss times 0
    target_kl: PositiveFloat | None = None  # no further epoch after one whose last ppo_kl is above 1.5 x this
    value_loss: ValueLossConfig = ValueLossConfig()
