"""Section `algorithm`: advantages and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import TypeAdapter

from mrl.config.sections.policy import PolicyLoss, RolloutCorrectionConfig, policy_loss
from mrl.config.sections.variants import Variants
from mrl.options.base import FilePath, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from mrl.options.estimators import ESTIMATORS, EstimatorOptions
from mrl.options.losses import AggMode


class KLConfig(Section):
    """A penalty for moving away from the reference policy."""

    use_in_reward: bool = False  # subtract coef * KL of the rollout policy from the reward of every token
    use_in_loss: bool = False  # add coef * KL to the actor's loss
    # estimator of a token's KL (nats); "+": its value with the gradient of k2, in the loss only
    penalty: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"
    # in the loss: multiply by the ratio to the rollout policy (DeepSeek-V3.2). With rollout_is that ratio is the loss's
    # ratio times the importance weights
    bias_correction: bool = False
    coef: NonNegativeFloat = 0.0  # weight of the KL; the adaptive controller starts from it
    controller: Literal["fixed", "adaptive"] = "fixed"  # adaptive: adjusts coef to reach `target`, with use_in_reward
    target: PositiveFloat | None = None  # target KL in nats per token, as mean over responses; adaptive only
    horizon_samples: PositiveInt | None = None  # samples over which coef moves by at most 20%; adaptive only


class ValueLossConfig(Section):
    """The critic's loss: clipped squared error to the returns."""

    cliprange_value: PositiveFloat = 0.5  # clip range of a new value around the old one
    loss_agg_mode: AggMode = "token-mean"  # aggregation of token losses
    # divisor of a response's sum, in tokens, for seq-mean-token-sum-norm; null: rollout.sampling.max_new_tokens
    loss_scale_factor: PositiveFloat | None = None


class PFPPOConfig(Section):
    """PF-PPO (arXiv 2409.06957): updates use samples redrawn from those of the step, with probabilities given by their
    scores."""

    # weight of a sample. pow: |score| ** weight_pow; max_min: 1 for the best and the worst, 0 for the others;
    # max_random: 0.4 for the best, 0.1 for the others
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: PositiveFloat = 2.0  # exponent of pow


if TYPE_CHECKING:
    AdvEstimator = str
else:
    AdvEstimator = Literal[(*ESTIMATORS,)]


class FilterGroupsConfig(Section):
    """Dynamic sampling (DAPO, arXiv 2503.14476): groups without a learning signal are dropped and replaced."""

    enable: bool = False  # drop the groups in which every response has the same `metric`
    # metric for `enable`: the score or a component of the reward; required if the score includes the length
    metric: str = "score"
    function: FilePath | None = None  # path/to/file.py:name, f(responses of a group) -> bool: keep the group?
    prompts_per_round: PositiveInt | None = None  # groups started at once; null, and at least: batch.prompts_per_step
    max_num_gen_batches: PositiveInt = 10  # maximum groups of a step, as a multiple of prompts_per_round
    on_shortage: Literal["stop", "fill"] = "stop"  # if groups are still missing: end the run, or use dropped groups

    @property
    def is_on(self) -> bool:
        return self.enable or self.function is not None


class AlgorithmConfig(EstimatorOptions):
    """Advantages from scores, and the losses of actor and critic. `adv_estimator` selects the estimator and adds its
    own keys."""

    # gae needs a critic. All but gae, remax, reinforce_plus_plus and function compare the samples of a prompt, so that
    # batch.samples_per_prompt must be at least 2
    adv_estimator: AdvEstimator
    use_score_scaling: bool = False  # divide scores by their running standard deviation
    use_score_norm: bool = False  # also subtract their running mean; with use_score_scaling
    score_clip: PositiveFloat | None = None  # clip scores, after scaling, to +- this
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    # old log-probs of the loss's ratios: recomputed by the trainer before the updates, or returned by the engine
    old_log_probs: Literal["trainer", "engine"] = "trainer"
    kl: KLConfig = KLConfig()
    policy_loss: PolicyLoss = policy_loss()
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    ratio_threshold: PositiveFloat | None = None  # set the actor loss to 0 if a mini-batch's mean ratio is above this
    target_kl: PositiveFloat | None = None  # early stopping: end the epochs of a step once ppo_kl is above 1.5 x this
    value_loss: ValueLossConfig = ValueLossConfig()
    pf_ppo: PFPPOConfig | None = None

    @property
    def own_options(self) -> dict[str, Any]:
        """The keys that only this estimator reads, with their values."""
        return {name: dict(self)[name] for name in ESTIMATORS[self.adv_estimator].model_fields}


ADVANTAGES = Variants("adv_estimator", "estimator", ESTIMATORS)
Algorithm = Annotated[AlgorithmConfig, ADVANTAGES]


def algorithm(**keys: Any) -> AlgorithmConfig:
    """Returns the section that a file with these keys has. Raises ValidationError."""
    found: AlgorithmConfig = TypeAdapter(Algorithm).validate_python(keys)
    return found
