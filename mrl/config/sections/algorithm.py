"""Advantages and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import TypeAdapter

from mrl.config.sections.base import FilePath, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from mrl.config.sections.policy import PolicyLoss, RolloutCorrectionConfig, policy_loss
from mrl.config.sections.variants import Variants
from mrl.options.estimators import ESTIMATORS, EstimatorOptions
from mrl.options.losses import AggMode


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


if TYPE_CHECKING:
    AdvEstimator = str
else:
    AdvEstimator = Literal[(*ESTIMATORS,)]


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups that teach nothing are dropped, and others sampled for them."""

    enable: bool = False  # drop the groups in which every response has the same `metric`
    # what `enable` compares: the score or a component of the reward; must be given where length is a part of the score
    metric: str = "score"
    function: FilePath | None = None  # path/to/file.py:name, f(responses of a group) -> bool: keep it?
    prompts_per_round: PositiveInt | None = None  # prompts sampled at once; null: batch.prompts_per_step
    max_num_gen_batches: PositiveInt = 10  # rounds a step, at most
    on_shortage: Literal["stop", "fill"] = "stop"  # when they were too few: end the run, or take dropped groups too

    @property
    def is_on(self) -> bool:
        return self.enable or self.function is not None


class AlgorithmConfig(EstimatorOptions):
    """From scores to advantages, and from these to the actor's and the critic's loss. `adv_estimator` brings the keys
    that it alone reads."""

    # gae has a critic; all but gae, remax and reinforce_plus_plus compare the samples of one prompt
    adv_estimator: AdvEstimator
    use_score_scaling: bool = False  # scores divided by the running standard deviation of all so far
    use_score_norm: bool = False  # scores minus their running mean as well; with use_score_scaling
    score_clip: PositiveFloat | None = None  # scores, scaled if they are, clipped to +- this
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    # the loss's ratios are to these: computed before the updates, or as the engine gave them
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    kl: KLConfig = KLConfig()
    policy_loss: PolicyLoss = policy_loss()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    ratio_threshold: PositiveFloat | None = None  # a mini-batch whose mean ratio is above has its actor loss times 0
    target_kl: PositiveFloat | None = None  # no further epoch after one whose last ppo_kl is above 1.5 x this
    value_loss: ValueLossConfig = ValueLossConfig()
    pf_ppo: PFPPOConfig | None = None

    @property
    def own_options(self) -> dict[str, Any]:
        """The keys that this estimator alone reads, with their values."""
        return {name: dict(self)[name] for name in ESTIMATORS[self.adv_estimator].model_fields}


ADVANTAGES = Variants("adv_estimator", "estimator", ESTIMATORS)
Algorithm = Annotated[AlgorithmConfig, ADVANTAGES]


def algorithm(**keys: Any) -> AlgorithmConfig:
    """The section that a file with these keys has. Raises ValidationError."""
    found: AlgorithmConfig = TypeAdapter(Algorithm).validate_python(keys)
    return found
