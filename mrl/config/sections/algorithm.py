"""Advantages and losses."""

from __future__ import annotations

from typing import Literal

from mrl.config.sections.base import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class KLConfig(Section):
    use_in_reward: bool = False
    use_in_loss: bool = False
    penalty: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"] = "k3"  # "+": with k2's gradient, in the loss
    coef: NonNegativeFloat = 0.0
    controller: Literal["fixed", "adaptive"] = "fixed"
    target: PositiveFloat | None = None  # adaptive only
    horizon_samples: PositiveInt | None = None  # adaptive only


AggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


POLICY_LOSS_OPTIONS: dict[str, tuple[str, ...]] = {  # of PolicyLossConfig's keys, those that a loss mode reads
    "vanilla": ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    "cispo": ("clip_ratio_low", "clip_ratio_high"),
    "sapo": ("tau_pos", "tau_neg"),
    "dro": ("dro_beta",),
    "gpg": (),
}


class PolicyLossConfig(Section):
    loss_mode: Literal["vanilla", "cispo", "sapo", "dro", "gpg"] = "vanilla"
    clip_ratio_low: PositiveFloat = 0.2
    clip_ratio_high: PositiveFloat = 0.2
    clip_ratio_c: float = 3.0  # dual clip, > 1
    tau_pos: PositiveFloat = 1.0  # sapo, where the advantage is positive
    tau_neg: PositiveFloat = 1.05
    dro_beta: PositiveFloat = 0.1
    loss_agg_mode: AggMode | None = None  # null: token-mean; sapo always takes seq-mean-token-mean
    loss_scale_factor: PositiveFloat | None = None  # seq-mean-token-sum-norm; null: rollout.sampling.max_new_tokens
    entropy_coef: NonNegativeFloat = 0.0

    @property
    def aggregation(self) -> AggMode:
        return self.loss_agg_mode or ("seq-mean-token-mean" if self.loss_mode == "sapo" else "token-mean")

    @property
    def options(self) -> dict[str, float]:
        return self.model_dump(include=set(POLICY_LOSS_OPTIONS[self.loss_mode]))


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
    value_loss: ValueLossConfig = ValueLossConfig()
