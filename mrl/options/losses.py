"""Policy losses: one class each, with the keys that this loss alone reads and the defaults of its paper.

The functions are in mrl.algo, by the same names; their arguments are these keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from mrl.options.base import CustomOptions, FilePath, Options, PositiveFloat, PositiveFraction

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Problem = tuple[tuple[str, ...], str]  # keys, the one to change first, and the mistake
NEVER_CLIPPED = "or the ratio is never clipped from below"


POLICY_LOSSES: dict[str, type[LossOptions]] = {}  # by loss_mode


class LossOptions(Options):
    """Properties of a policy loss, besides its keys."""

    registry: ClassVar[dict[str, Any]] = POLICY_LOSSES
    usual_aggregate: ClassVar[AggMode] = "token-mean"  # if loss_agg_mode is null
    is_fixed_aggregate: ClassVar[bool] = False  # other aggregations are impossible
    one_weight_a_response: ClassVar[bool] = False  # importance weights of tokens become one of the response
    uses_ratio: ClassVar[bool] = True
    uses_whole_ratio: ClassVar[bool] = False  # ratio of a response: the loss itself corrects for the old policy
    needs_moved_policy: ClassVar[bool] = False  # at ratio 1 the loss is the plain policy gradient
    chooses_tokens: ClassVar[bool] = False  # by the function of the same name in mrl.algo.token_choice

    def problems(self) -> Iterator[Problem]:
        """Yields mistakes that bounds of single keys cannot express."""
        yield from ()


class Vanilla(LossOptions, name="vanilla"):
    """PPO's clipped surrogate (arXiv 1707.06347) with the dual clip (arXiv 1912.09729).

    DAPO's loss (arXiv 2503.14476) is this one with clip_ratio_high 0.28. Unless loss_agg_mode says otherwise, this loss
    and all that name no other aggregation use token-mean.
    """

    clip_ratio_low: PositiveFloat = 0.2  # clip ratios below at 1 - this
    clip_ratio_high: PositiveFloat = 0.2  # clip ratios above at 1 + this
    clip_ratio_c: PositiveFloat = 3.0  # dual clip, above 1: maximum ratio if the advantage is negative

    def problems(self) -> Iterator[Problem]:
        if self.clip_ratio_c <= 1:
            yield ("clip_ratio_c",), f"must be greater than 1 (dual clip), got {self.clip_ratio_c}"
        yield from _low_of_1("vanilla", self.clip_ratio_low)


class GSPO(LossOptions, name="gspo"):
    """Group sequence policy optimization (arXiv 2507.18071): PPO's clip on a response's ratio, the geometric mean of
    its tokens' ratios. Aggregated by seq-mean-token-mean, unless loss_agg_mode is set."""

    usual_aggregate: ClassVar[AggMode] = "seq-mean-token-mean"

    clip_ratio_low: PositiveFloat = 3e-4  # clip a response's ratio below at 1 - this
    clip_ratio_high: PositiveFloat = 4e-4  # clip a response's ratio above at 1 + this

    def problems(self) -> Iterator[Problem]:
        yield from _low_of_1("gspo", self.clip_ratio_low)


class GeoMean(LossOptions, name="geo_mean"):
    """Geometric-mean policy optimization (GMPO, arXiv 2507.20673). Its bounds apply to log-ratios: 0.4 clips ratios to
    exp(-0.4) = 0.67 and exp(0.4) = 1.49. Always aggregated by seq-mean-token-mean."""

    usual_aggregate: ClassVar[AggMode] = "seq-mean-token-mean"
    is_fixed_aggregate: ClassVar[bool] = True
    one_weight_a_response: ClassVar[bool] = True

    clip_ratio_low: PositiveFloat = 0.4  # clip a token's log-ratio below at minus this
    clip_ratio_high: PositiveFloat = 0.4  # clip a token's log-ratio above at this


class CISPO(LossOptions, name="cispo"):
    """Clipped importance weights (arXiv 2506.13585): a clipped token keeps its gradient."""

    clip_ratio_low: PositiveFloat = 1.0  # clip ratios below at 1 - this; 1 or more: no lower bound, as in the paper
    clip_ratio_high: PositiveFloat = 0.2  # clip ratios above at 1 + this; verl's value, the paper gives none


class SAPO(LossOptions, name="sapo"):
    """Soft adaptive policy optimization (arXiv 2511.20347): a soft gate in place of a clip. Always aggregated by
    seq-mean-token-mean."""

    usual_aggregate: ClassVar[AggMode] = "seq-mean-token-mean"
    is_fixed_aggregate: ClassVar[bool] = True

    tau_pos: PositiveFloat = 1.0  # steepness of the gate for positive advantages
    tau_neg: PositiveFloat = 1.05  # steepness of the gate for other advantages


class ClipCov(LossOptions, name="clip_cov"):
    """Clip-Cov (arXiv 2505.22617): PPO's clipped surrogate, without gradient for a few tokens of high covariance."""

    chooses_tokens: ClassVar[bool] = True

    clip_ratio_low: PositiveFloat = 0.2  # clip ratios below at 1 - this
    clip_ratio_high: PositiveFloat = 0.2  # clip ratios above at 1 + this
    clip_cov_ratio: PositiveFraction = 0.0002  # share of the mini-batch's tokens (at least one) without gradient
    clip_cov_lb: float = 1.0  # lower bound of their covariance of advantage and log-prob
    clip_cov_ub: float = 5.0  # upper bound of that covariance

    def problems(self) -> Iterator[Problem]:
        yield from _low_of_1("clip_cov", self.clip_ratio_low)
        if self.clip_cov_lb >= self.clip_cov_ub:
            between = f"above {self.clip_cov_lb} and below {self.clip_cov_ub}"
            yield ("clip_cov_lb", "clip_cov_ub"), f"no covariance is {between}, so no token would be clipped"


class KLCov(LossOptions, name="kl_cov"):
    """KL-Cov (arXiv 2505.22617): no clip; the few tokens of highest covariance get a KL penalty."""

    chooses_tokens: ClassVar[bool] = True
    needs_moved_policy: ClassVar[bool] = True

    kl_cov_ratio: PositiveFraction = 0.0002  # share of the mini-batch's tokens (at least one) that get the penalty
    ppo_kl_coef: PositiveFloat = 1.0  # coefficient of the penalty


class DPPOTV(LossOptions, name="dppo_tv"):
    """DPPO (arXiv 2602.04879): no gradient for a token that has moved too far in its advantage's direction. The
    distance is |p - p_old|, not a ratio."""

    renamed: ClassVar[Mapping[str, str]] = {"clip_ratio_low": "divergence_low", "clip_ratio_high": "divergence_high"}

    divergence_low: PositiveFloat = 0.15  # maximum decrease of p, if the advantage is not positive
    divergence_high: PositiveFloat = 0.15  # maximum increase of p, if the advantage is positive
    dppo_ratio_cap: PositiveFloat = 20.0  # maximum ratio

    def problems(self) -> Iterator[Problem]:
        because = "or nothing is masked, since two probabilities never differ by more"
        yield from _low_of_1("dppo_tv", self.divergence_low, "divergence_low", because)


class DPPOKL(LossOptions, name="dppo_kl"):
    """DPPO (arXiv 2602.04879) with KL(p_old || p) of "this token or another" as the distance."""

    renamed: ClassVar[Mapping[str, str]] = {"clip_ratio_low": "divergence_low", "clip_ratio_high": "divergence_high"}

    divergence_low: PositiveFloat = 0.05  # maximum KL in nats for a decrease of p, if the advantage is not positive
    divergence_high: PositiveFloat = 0.05  # maximum KL in nats for an increase of p, if the advantage is positive
    dppo_ratio_cap: PositiveFloat = 20.0  # maximum ratio


class DRO(LossOptions, name="dro"):
    """Direct reward optimization: a quadratic penalty on the log-ratio replaces the clip."""

    needs_moved_policy: ClassVar[bool] = True

    dro_beta: PositiveFloat = 0.1  # twice the weight of the squared log-ratio


class GPG(LossOptions, name="gpg"):
    """The plain policy gradient (arXiv 2504.02546), without a ratio and without keys of its own."""

    uses_ratio: ClassVar[bool] = False


class Vespo(LossOptions, name="vespo"):
    """Variational sequence-level soft policy optimization (arXiv 2602.10693): a response has the weight
    W^k * exp(lambda * (1 - W)), where W is the ratio of the whole response."""

    uses_whole_ratio: ClassVar[bool] = True

    vespo_k_pos: PositiveFloat = 2.0  # k if the advantage is not negative
    vespo_lambda_pos: PositiveFloat = 3.0  # lambda if the advantage is not negative
    vespo_k_neg: PositiveFloat = 3.0  # k if the advantage is negative
    vespo_lambda_neg: PositiveFloat = 2.0  # lambda if the advantage is negative


class CustomLoss(LossOptions, name="function"):
    """A loss of your own: see docs/extending.md. `function` alone selects this mode."""

    implied_by: ClassVar[str | None] = "function"

    function: FilePath  # path/to/file.py:name, f(PolicyInputs, **options) -> TokenLoss
    options: CustomOptions = {}  # its keyword arguments


def _low_of_1(loss: str, low: float, key: str = "clip_ratio_low", because: str = NEVER_CLIPPED) -> Iterator[Problem]:
    if low >= 1:
        yield (key,), f"must be below 1 for {loss}, {because}; got {low}"
