"""Advantage estimators: one class each, with the keys that this estimator alone reads and their defaults.

The functions are in mrl.algo, by the same names; their arguments are these keys.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from mrl.options.base import CustomOptions, FilePath, Fraction, Options, PositiveFloat, Section

ESTIMATORS: dict[str, type[EstimatorOptions]] = {}  # by adv_estimator


class EstimatorOptions(Options):
    """Properties of an estimator, besides its keys."""

    registry: ClassVar[dict[str, Any]] = ESTIMATORS
    compares_group: ClassVar[bool] = True  # it needs two responses to a prompt, or more
    takes_values: ClassVar[Literal["never", "maybe", "always"]] = "never"  # of a critic
    takes_turns: ClassVar[bool] = False  # rewards of an agent's turns count where they are; else their sum, at the end
    needs_greedy: ClassVar[bool] = False  # the greedy response to every prompt
    needs_distribution: ClassVar[bool] = False  # the sums of squared probabilities over the vocabulary

    @property
    def score_parts(self) -> tuple[str, ...]:
        """Names of the reward components that the estimator needs."""
        return ()

    @property
    def is_scale_free(self) -> bool:
        """True if scaling all scores leaves the advantages unchanged."""
        return False

    @property
    def is_shift_free(self) -> bool:
        """True if adding a number to all scores of a step leaves the advantages unchanged."""
        return False


class Baseline(EstimatorOptions):
    """Properties of estimators that subtract a weighted mean of the scores of the same prompt."""

    @property
    def is_shift_free(self) -> bool:
        return True


class Whitening(EstimatorOptions):
    """Options of estimators that can whiten their advantages."""

    whiten_advantages: bool = True  # normalize to mean 0 and deviation 1 over the tokens of a step
    whiten_shift_mean: bool = True  # false: normalize the scale only, not the mean

    @property
    def whitens_mean(self) -> bool:
        """True if the mean over the tokens of a step becomes 0 and the deviation 1."""
        return self.whiten_advantages and self.whiten_shift_mean


class GroupScale(EstimatorOptions):
    """Options of estimators that can divide by the group's standard deviation."""

    norm_adv_by_std_in_grpo: bool = True  # divide by the group's standard deviation; false: Dr.GRPO


class GAE(Whitening, name="gae"):
    """Generalized advantage estimation (arXiv 1506.02438), from a critic's values."""

    compares_group: ClassVar[bool] = False
    takes_values: ClassVar[Literal["never", "maybe", "always"]] = "always"
    takes_turns: ClassVar[bool] = True

    gamma: Fraction = 1.0  # discount per token
    lam: Fraction = 1.0  # 1: the whole return (least bias); 0: one step (least variance)


class GRPO(GroupScale, Baseline, name="grpo"):
    """Group-relative advantages (arXiv 2402.03300); Dr.GRPO (arXiv 2503.20783)."""

    @property
    def is_scale_free(self) -> bool:
        return self.norm_adv_by_std_in_grpo


class GRPOPassK(GRPO, name="grpo_passk"):
    """Pass@k (arXiv 2503.19595): only the best response of a group has an advantage."""


class RLOO(Baseline, name="rloo"):
    """REINFORCE leave-one-out (arXiv 2402.14740)."""


class OPO(Baseline, name="opo"):
    """Optimal on-policy baseline (arXiv 2505.23585)."""


class GPG(EstimatorOptions, name="gpg"):
    """Group policy gradient (arXiv 2504.02546)."""

    gpg_f_norm: PositiveFloat = 1.0  # divisor of advantages


class GDPO(Whitening, GroupScale, name="gdpo"):
    """GDPO (arXiv 2601.05242): the weighted sum of grpo's advantages of each reward component, whitened."""

    gdpo_reward_keys: tuple[str, ...] = ()  # required: components of the reward; may include "score"
    gdpo_reward_weights: tuple[float, ...] | None = None  # weights of gdpo_reward_keys; null: all 1

    @property
    def score_parts(self) -> tuple[str, ...]:
        return self.gdpo_reward_keys


class ReinforcePlusPlus(Whitening, name="reinforce_plus_plus"):
    """REINFORCE++ (arXiv 2501.03262): the discounted reward-to-go, whitened."""

    compares_group: ClassVar[bool] = False
    takes_turns: ClassVar[bool] = True

    gamma: Fraction = 1.0  # discount per token

    @property
    def is_scale_free(self) -> bool:
        return self.whitens_mean

    @property
    def is_shift_free(self) -> bool:
        return self.whitens_mean and self.gamma == 1


class ReinforcePlusPlusBaseline(Whitening, Baseline, name="reinforce_plus_plus_baseline"):
    """REINFORCE++ with the group's mean as its baseline (arXiv 2501.03262), whitened."""

    @property
    def is_scale_free(self) -> bool:
        return self.whitens_mean


class ReMax(Baseline, name="remax"):
    """ReMax (arXiv 2310.10505): the baseline is the score of the greedy response to the same prompt."""

    compares_group: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = True


class TokenBaseline(EstimatorOptions, name="optimal_token_baseline"):
    """Separate baseline for every token position of a group (arXiv 2602.07078)."""

    needs_distribution: ClassVar[bool] = True

    zero_tail: bool | None = None  # baseline 0 where only one response of a group remains; null: no


class TIRTokenBaseline(EstimatorOptions, name="tir_optimal_token_baseline"):
    """Separate baseline for every token position of a group, where observations do not count as positions."""

    needs_distribution: ClassVar[bool] = True

    zero_tail: bool | None = None  # baseline 0 where only one response of a group remains; null: yes


class CustomAdvantage(Section):
    """An estimator of your own: see docs/extending.md."""

    function: FilePath  # path/to/file.py:name, f(AdvantageInputs, **options) -> (advantages, returns)
    options: CustomOptions = {}  # its keyword arguments


class CustomEstimator(EstimatorOptions, name="function"):
    """An estimator of your own; `advantage` alone chooses this one. It may have a critic."""

    compares_group: ClassVar[bool] = False
    takes_values: ClassVar[Literal["never", "maybe", "always"]] = "maybe"
    implied_by: ClassVar[str | None] = "advantage"

    advantage: CustomAdvantage
