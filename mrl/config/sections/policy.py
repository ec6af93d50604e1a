"""The policy loss, and what corrects it for the engine that sampled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mrl.config.sections.base import NonNegativeFloat, PositiveFloat, Section

AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

_CLIP = ("clip_ratio_low", "clip_ratio_high")
POLICY_LOSS_OPTIONS: dict[str, tuple[str, ...]] = {  # of PolicyLossConfig's keys, those that a loss mode reads
    "vanilla": (*_CLIP, "clip_ratio_c"),
    "gspo": _CLIP,
    "geo_mean": _CLIP,
    "cispo": _CLIP,
    "sapo": ("tau_pos", "tau_neg"),
    "clip_cov": _CLIP,
    "kl_cov": ("ppo_kl_coef",),
    "dppo_tv": (*_CLIP, "dppo_ratio_cap"),
    "dppo_kl": (*_CLIP, "dppo_ratio_cap"),
    "dro": ("dro_beta",),
    "gpg": (),
    "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}
TOKEN_CHOICE_OPTIONS: dict[str, tuple[str, ...]] = {  # and those that choose its tokens
    "clip_cov": (*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio",),
}
SEQUENCE_LOSSES = ("gspo", "geo_mean", "sapo")  # means over responses of their token means, where nothing else is set
FIXED_AGGREGATION = ("geo_mean", "sapo")  # and nothing else can be

TokenShare = Annotated[float, Field(gt=0, le=1)]


class PolicyLossConfig(Section):
    """The actor's loss, and the constants of each `loss_mode`: a key that names modes is read by these alone."""

    loss_mode: Literal[
        "vanilla",
        "gspo",
        "geo_mean",
        "cispo",
        "sapo",
        "clip_cov",
        "kl_cov",
        "dppo_tv",
        "dppo_kl",
        "dro",
        "gpg",
        "vespo",
    ] = "vanilla"  # the loss of a token or response; see mrl.algo
    # ratios count down to 1 - this; papers: gspo 3e-4, geo_mean 0.4, cispo none (1); of dppo_tv and dppo_kl a distance
    clip_ratio_low: PositiveFloat = 0.2
    clip_ratio_high: PositiveFloat = 0.2  # ratios count up to 1 + this; papers: gspo 4e-4, geo_mean 0.4, DAPO 0.28
    clip_ratio_c: float = 3.0  # vanilla, > 1 (dual clip): ratios count up to this where the advantage is negative
    tau_pos: PositiveFloat = 1.0  # sapo: steepness of its soft gate where the advantage is positive
    tau_neg: PositiveFloat = 1.05  # sapo: steepness of its soft gate elsewhere
    dro_beta: PositiveFloat = 0.1  # dro: half of it weighs the squared log-ratio
    dppo_ratio_cap: PositiveFloat = 20.0  # dppo_tv, dppo_kl: ratios count up to this
    clip_cov_ratio: TokenShare = 0.0002  # clip_cov: share of the mini-batch's tokens (at least one) that learn nothing
    clip_cov_lb: float = 1.0  # clip_cov: the covariance of advantage and log-prob of these is above this
    clip_cov_ub: float = 5.0  # clip_cov: and below this
    # kl_cov: share of the mini-batch's tokens (at least one), of highest covariance, that get a KL penalty
    kl_cov_ratio: TokenShare = 0.0002
    ppo_kl_coef: PositiveFloat = 1.0  # kl_cov: coefficient of that penalty
    vespo_k_pos: PositiveFloat = 2.0  # vespo: k of W^k * exp(lambda * (1 - W)) where the advantage is not negative
    vespo_lambda_pos: PositiveFloat = 3.0  # vespo: lambda where the advantage is not negative
    vespo_k_neg: PositiveFloat = 3.0  # vespo: k where the advantage is negative
    vespo_lambda_neg: PositiveFloat = 2.0  # vespo: lambda where the advantage is negative
    # nats a token: responses of negative advantage further than this from the policy that drew them teach nothing;
    # TRL: 0.5
    off_policy_mask_threshold: PositiveFloat | None = None
    high_entropy_token_ratio: TokenShare = 1.0  # only this share of a mini-batch's tokens, of highest entropy, learns
    # how the losses of tokens become one number; null: token-mean, of gspo, geo_mean and sapo seq-mean-token-mean
    loss_agg_mode: AggMode | None = None
    # tokens that a response's sum is divided by; of seq-mean-token-sum-norm; null: rollout.sampling.max_new_tokens
    loss_scale_factor: PositiveFloat | None = None
    entropy_coef: NonNegativeFloat = 0.0  # the loss loses this times the entropy (nats a token)

    @property
    def aggregation(self) -> AggMode:
        return self.loss_agg_mode or ("seq-mean-token-mean" if self.loss_mode in SEQUENCE_LOSSES else "token-mean")

    @property
    def options(self) -> dict[str, float]:
        return self.model_dump(include=set(POLICY_LOSS_OPTIONS[self.loss_mode]))

    @property
    def choice_options(self) -> dict[str, float] | None:
        """None for a loss that treats all tokens alike."""
        if self.loss_mode not in TOKEN_CHOICE_OPTIONS:
            return None
        return self.model_dump(include=set(TOKEN_CHOICE_OPTIONS[self.loss_mode]))


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    """ "a, b", 2.0 and lists alike: verl's form is one string."""
    value = _text(value)
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


Bounds = Annotated[str, BeforeValidator(_text)]
Criterion = Literal[
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3",
]  # fmt: skip


class RolloutCorrectionConfig(Section):
    """Correction for the engine, whose policy is not quite the trainer's: by w = exp(trainer's - engine's log-prob).
    See mrl.algo.rollout_correction."""

    # the loss times w, of each token or of its whole response; null: not
    rollout_is: Literal["token", "sequence"] | None = None
    rollout_is_threshold: Bounds = "2.0"  # "2.0": no more than 2 (TIS); "0.5_2.0": 0 outside (IcePop); "inf": any w
    rollout_is_batch_normalize: bool = False  # weights divided by their mean
    # criteria that reject: single tokens (token_*) or whole responses
    rollout_rs: Annotated[tuple[Criterion, ...], BeforeValidator(_listed)] = ()
    # one bound for all criteria, or one each. Of the ratio for a k1: "0.5_2.0", or "2.0", which means the same; of the
    # statistic for the others: "0.01"
    rollout_rs_threshold: Annotated[tuple[Bounds, ...], BeforeValidator(_listed)] = ()

    def importance_bounds(self) -> tuple[float | None, float]:
        """(lower or None, upper) of the weights. ValueError for what is no such pair."""
        lower, upper = _bounds(self.rollout_is_threshold)
        if not upper >= 1 or (lower is not None and not 0 <= lower <= 1):
            raise ValueError(f"{self.rollout_is_threshold!r} cuts the weight 1, that of equal policies")
        return lower, upper

    def criteria(self) -> list[tuple[str, float, float]]:
        """(name, lower, upper) of every criterion. ValueError for what is not that."""
        names, thresholds = self.rollout_rs, self.rollout_rs_threshold
        if len(thresholds) not in (1, len(names)):
            raise ValueError(f"{len(thresholds)} thresholds for {len(names)} criteria: give one for all or one each")
        return [_criterion(name, text) for name, text in zip(names, thresholds * len(names), strict=False)]


def _criterion(name: str, text: str) -> tuple[str, float, float]:
    lower, upper = _bounds(text)
    if not name.endswith("k1"):
        if lower is not None or not upper > 0:
            raise ValueError(f"{text!r} for {name}: it takes one positive upper bound")
        return name, 0.0, upper
    lower = 1 / upper if lower is None and upper else lower
    if lower is None or not 0 < lower <= 1 <= upper:
        raise ValueError(f"{text!r} for {name}: it takes positive bounds of a ratio, with 1 between them")
    return name, lower, upper


def _bounds(text: str) -> tuple[float | None, float]:
    """ "2.0" -> (None, 2.0), "0.5_2.0" -> (0.5, 2.0)."""
    lower, has_two, upper = text.strip().rpartition("_")
    try:
        return (float(lower) if has_two else None), float(upper)
    except ValueError:
        raise ValueError(f'{text!r} is neither a number nor two like "0.5_2.0"') from None
