"""Sections `algorithm.policy_loss` and `algorithm.rollout_correction`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, TypeAdapter

from mrl.config.sections.variants import Variants
from mrl.options.base import NonNegativeFloat, PositiveFloat, PositiveFraction, PositiveInt, Section
from mrl.options.losses import POLICY_LOSSES, AggMode, LossOptions

if TYPE_CHECKING:
    LossMode = str
else:
    LossMode = Literal[(*POLICY_LOSSES,)]


class PolicyLossConfig(LossOptions):
    """The actor's loss. `loss_mode` selects it and adds its own keys."""

    loss_mode: LossMode = "vanilla"  # the loss of a token or response; see mrl.algo
    # mask responses with a negative advantage that are further than this from the rollout policy, in nats per token;
    # TRL uses 0.5
    off_policy_mask_threshold: PositiveFloat | None = None
    # train only on this share of a mini-batch's tokens, by highest entropy
    high_entropy_token_ratio: PositiveFraction = 1.0
    loss_agg_mode: AggMode | None = None  # aggregation of token losses; null: the default of the loss_mode, below
    # divisor of a response's sum, in tokens, for seq-mean-token-sum-norm; null: rollout.sampling.max_new_tokens
    loss_scale_factor: PositiveFloat | None = None
    entropy_coef: NonNegativeFloat = 0.0  # entropy bonus: subtract this times the entropy (nats per token)
    entropy_coef_end: NonNegativeFloat | None = None  # final value of `entropy_coef`, reached linearly; null: constant
    entropy_coef_steps: PositiveInt | None = None  # steps until `entropy_coef_end` is reached

    def at_step(self, step: int) -> Self:
        """Returns the section with the `entropy_coef` of step `step`, counted from 0."""
        if self.entropy_coef_end is None or self.entropy_coef_steps is None:
            return self
        share = min(1.0, step / self.entropy_coef_steps)
        coef = (1 - share) * self.entropy_coef + share * self.entropy_coef_end
        return self.model_copy(update={"entropy_coef": coef})

    @property
    def aggregation(self) -> AggMode:
        return self.loss_agg_mode or self.usual_aggregate

    @property
    def own_options(self) -> dict[str, Any]:
        """The keys that only this loss reads, with their values."""
        return {name: dict(self)[name] for name in POLICY_LOSSES[self.loss_mode].model_fields}


POLICY_LOSS = Variants("loss_mode", "loss", POLICY_LOSSES)
PolicyLoss = Annotated[PolicyLossConfig, POLICY_LOSS]


def policy_loss(**keys: Any) -> PolicyLossConfig:
    """Returns the section that a file with these keys has. Raises ValidationError."""
    found: PolicyLossConfig = TypeAdapter(PolicyLoss).validate_python(keys)
    return found


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    """Accepts "a, b" (verl's form), 2.0 and lists."""
    value = _text(value)
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


Bounds = Annotated[str, BeforeValidator(_text)]
Criterion = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


class RolloutCorrectionConfig(Section):
    """Correction of the train / rollout mismatch by importance weights w = exp(trainer log-prob - engine log-prob) or
    rejection. See mrl.algo.rollout_correction."""

    # multiply the loss by w of each token, or of its whole response; null: no importance weights
    rollout_is: Literal["token", "sequence"] | None = None
    rollout_is_threshold: Bounds = "2.0"  # "2.0": truncate at 2 (TIS); "0.5_2.0": 0 outside (IcePop); "inf": no bound
    rollout_is_batch_normalize: bool = False  # divide weights by their mean
    # rejection criteria, for single tokens (token_*) or whole responses (seq_*)
    rollout_rs: Annotated[tuple[Criterion, ...], BeforeValidator(_listed)] = ()
    # one bound for all criteria, or one each. For k1 it bounds the ratio: "0.5_2.0", or equally "2.0"; for the others,
    # the statistic: "0.01"
    rollout_rs_threshold: Annotated[tuple[Bounds, ...], BeforeValidator(_listed)] = ()

    def importance_bounds(self) -> tuple[float | None, float]:
        """Returns (lower or None, upper) bounds of the weights. Raises ValueError if the text is not such a pair."""
        lower, upper = _bounds(self.rollout_is_threshold)
        if not upper >= 1 or (lower is not None and not 0 <= lower <= 1):
            raise ValueError(f"{self.rollout_is_threshold!r} excludes the weight 1 of equal policies: include 1")
        return lower, upper

    def criteria(self) -> list[tuple[str, float, float]]:
        """Returns (name, lower, upper) for every criterion. Raises ValueError if a bound is invalid."""
        names, thresholds = self.rollout_rs, self.rollout_rs_threshold
        if len(thresholds) not in (1, len(names)):
            raise ValueError(f"{len(thresholds)} thresholds for {len(names)} criteria: give one for all or one each")
        return [_criterion(name, text) for name, text in zip(names, thresholds * len(names), strict=False)]


def _criterion(name: str, text: str) -> tuple[str, float, float]:
    lower, upper = _bounds(text)
    if not name.endswith("k1"):
        if lower is not None or not upper > 0:
            raise ValueError(f"{text!r} for {name}: expected one positive upper bound")
        return name, 0.0, upper
    lower = 1 / upper if lower is None and upper else lower
    if lower is None or not 0 < lower <= 1 <= upper:
        raise ValueError(f"{text!r} for {name}: expected positive bounds of a ratio, with 1 between them")
    return name, lower, upper


def _bounds(text: str) -> tuple[float | None, float]:
    """Parses "2.0" into (None, 2.0), and "0.5_2.0" into (0.5, 2.0)."""
    lower, has_two, upper = text.strip().rpartition("_")
    try:
        return (float(lower) if has_two else None), float(upper)
    except ValueError:
        raise ValueError(f'{text!r} is neither a number nor a pair such as "0.5_2.0"') from None
