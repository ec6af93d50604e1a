"""Advantages and losses."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from mrl.config.sections.policy import AggMode, PolicyLossConfig, RolloutCorrectionConfig


class KLConfig(Section):
    """A penalty for moving away from the reference policy."""

    use_in_reward: bool = False  # the reward of every token loses coef * KL of the policy that drew it
    use_in_loss: bool = False  # the actor's loss gains coef * KL
    # estimator of a token's KL (nats); "+": with k2's gradient, in the loss only
    penalty: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"
    bias_correction: bool = False  # in the loss: times the ratio to the policy that drew the token (DeepSeek-V3.2)
    coef: NonNegativeFloat = 0.0  # weight of the KL; the adaptive controller starts from it
    controller: Literal["fixed", "adaptive"] = "fixed"  # adaptive: coef is steered towards `target`, for use_in_reward
    target: PositiveFloat | None = None  # nats a token, the mean over responses; adaptive only
    horizon_samples: PositiveInt | None = None  # samples over which coef moves by at most 20%; adaptive only


class ValueLossConfig(Section):
    """The critic's loss: clipped squared error to the returns."""

    cliprange_value: PositiveFloat = 0.5  # a new value counts as at most this far from the old one
    loss_agg_mode: AggMode = "token-mean"  # how the losses of tokens become one number
    # tokens that a response's sum is divided by; of seq-mean-token-sum-norm; null: rollout.sampling.max_new_tokens
    loss_scale_factor: PositiveFloat | None = None


class PFPPOConfig(Section):
    """The updates of a step take samples drawn from its own by their scores (PF-PPO): see mrl.algo.resampling."""

    # pow: by |score| ** weight_pow; max_min: the best and the worst; max_random: 0.4 for the best, 0.1 for the others
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: PositiveFloat = 2.0  # exponent of pow


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
    metric: str = "score"  # what `enable` compares: the score or a component of the reward
    function: str | None = None  # path/to/file.py:name, f(responses of a group) -> bool: keep it?
    prompts_per_round: PositiveInt | None = None  # prompts sampled at once; null: batch.prompts_per_step
    max_num_gen_batches: PositiveInt = 10  # rounds a step, at most
    on_shortage: Literal["stop", "fill"] = "stop"  # when they were too few: end the run, or take dropped groups too

    @property
    def is_on(self) -> bool:
        return self.enable or self.function is not None


class AlgorithmConfig(Section):
    """From scores to advantages, and from these to the actor's and the critic's loss."""

    # gae has a critic; all but gae, remax and reinforce_plus_plus compare the samples of one prompt
    adv_estimator: AdvEstimator
    gamma: Fraction = 1.0  # discount a token, of gae and reinforce_plus_plus
    lam: Fraction = 1.0  # of gae: 1 is the whole return (least bias), 0 one step (least variance)
    # divide by the group's standard deviation (false: Dr.GRPO); of grpo, grpo_passk, gdpo
    norm_adv_by_std_in_grpo: bool = True
    # to mean 0 and deviation 1 over a step's tokens; of gae, reinforce_plus_plus, its baseline, gdpo
    whiten_advantages: bool = True
    whiten_shift_mean: bool = True  # false: whitening changes their scale only, not their mean
    gpg_f_norm: PositiveFloat = 1.0  # gpg's advantages are divided by it
    # of the token baselines: baseline 0 where one response of a group is left; null: only tir_optimal_token_baseline
    zero_tail: bool | None = None
    gdpo_reward_keys: tuple[str, ...] = ()  # components of the reward, "score" among them if it is one
    gdpo_reward_weights: tuple[float, ...] | None = None  # of gdpo_reward_keys; all 1 when null
    use_score_scaling: bool = False  # scores divided by the running standard deviation of all so far
    use_score_norm: bool = False  # scores minus their running mean as well; with use_score_scaling
    score_clip: PositiveFloat | None = None  # scores, scaled if they are, clipped to +- this
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    # the loss's ratios are to these: computed before the updates, or as the engine gave them
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    kl: KLConfig = KLConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    ratio_threshold: PositiveFloat | None = None  # a mini-batch whose mean ratio is above has its actor loss times 0
    target_kl: PositiveFloat | None = None  # no further epoch after one whose last ppo_kl is above 1.5 x this
    value_loss: ValueLossConfig = ValueLossConfig()
    pf_ppo: PFPPOConfig | None = None
