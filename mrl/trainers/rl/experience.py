"""Turns scored samples into training targets: log-probs, values, rewards, advantages. The same on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl import units
from mrl.algo import advantages, aggregate, custom, kl, resampling, token_rewards
from mrl.algo.advantages import Estimator
from mrl.config.schema import AlgorithmConfig, KLConfig, PFPPOConfig, RolloutCorrectionConfig
from mrl.config.trainers.rl import needs_forward_pass
from mrl.core import Rollout
from mrl.inference.seeds import sample_seed
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy
from mrl.options.estimators import CustomEstimator
from mrl.trainers.rl.correction import FlatCorrection, correction_of
from mrl.trainers.rl.replay import Reused
from mrl.trainers.shared.references import ActorWithoutAdapters
from mrl.units import PerResponseToken

RESAMPLING_STREAM = 1 << 44  # keeps the draws of samples apart from all others


@dataclass(frozen=True)
class Passes:
    """Outputs of the models for a step's samples before its first update. Flat [R]; None: not needed, or the first
    update computes it anyway.

    log_probs, entropies: the trainer's
    sum_pi_squared: sums over the vocabulary of its squared probabilities
    experts: as `Rollout.routed_experts`, those that the trainer's routers chose
    """

    log_probs: Tensor | None = None
    entropies: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    ref_log_probs: Tensor | None = None
    values: Tensor | None = None
    experts: Tensor | None = None


@dataclass(frozen=True)
class Experience:
    """Flat [R] vectors of one step. Raises ValueError for those that do not fit the rollout.

    trainer_log_probs, entropies: see Passes. old_log_probs None: see mrl.learner.losses.PolicyTargets
    is_old_policy: the old log-probs are the trainer's own, known or not
    mean_ref_kl: mean over the new responses of each one's token mean, as verl's controller takes it
    """

    rollout: Rollout
    advantages: PerResponseToken
    returns: PerResponseToken
    old_log_probs: PerResponseToken | None
    trainer_log_probs: PerResponseToken | None
    ref_log_probs: PerResponseToken | None
    values: PerResponseToken | None
    mean_ref_kl: float | None
    is_old_policy: bool
    entropies: PerResponseToken | None = None
    correction: FlatCorrection | None = None
    reused: Reused | None = None

    def __post_init__(self) -> None:
        units.check(self, self.rollout)

    @property
    def is_new(self) -> Tensor:
        """[R] bool: tokens that the policy has drawn that this step began with."""
        return torch.ones_like(self.advantages, dtype=torch.bool) if self.reused is None else ~self.reused.tokens

    @property
    def num_new_samples(self) -> int:
        return self.rollout.num_samples - (int(self.reused.samples.sum()) if self.reused is not None else 0)

    @property
    def metrics(self) -> dict[str, float]:
        return self.correction.metrics if self.correction is not None else {}

    def pick(self, samples: Tensor) -> Experience:
        """Returns the experience of some samples, in the order of `samples` [b] int64, which may name one more than
        once."""
        return units.pick(self, samples, of=self.rollout)

    def part(self, samples: Sequence[int]) -> Experience:
        """Returns the experience of some samples; without a copy where they are a range."""
        if isinstance(samples, range):
            return units.part(self, samples, of=self.rollout)
        return self.pick(torch.tensor(samples))

    def targets(self) -> list[Tensor]:
        """Returns all flat vectors that a loss may use."""
        maybe = (self.old_log_probs, self.trainer_log_probs, self.ref_log_probs, self.values)
        return [self.advantages, self.returns, *(vector for vector in maybe if vector is not None)]


def forward_passes(
    cfg: AlgorithmConfig,
    rollout: Rollout,
    temperature: float,
    actor: Learner,
    critic: Learner | None = None,
    ref: Learner | PolicyCopy | ActorWithoutAdapters | None = None,
    *,
    single_update: bool = False,
    notes_experts: bool = False,
) -> Passes:
    """Collective. `single_update`: the step makes one update from these samples, so the ratio to the old policy is 1 by
    itself and the separate pass for old log-probs is not needed (unless something else needs it). `notes_experts`: of
    an actor that replays, in the pass of its own that there must be then. The reference's routers choose by
    themselves."""
    trainers = entropies = squares = experts = None
    with actor.replay.recording() if notes_experts and actor.replay is not None else contextlib.nullcontext():
        if cfg.needs_distribution:
            trainers, entropies, squares = actor.distribution(rollout, temperature)
        elif needs_forward_pass(cfg, single_update):
            trainers, entropies = actor.log_probs(rollout, temperature)
    if notes_experts and actor.replay is not None:
        experts = actor.replay.recorded(rollout)
    ref_log_probs = ref.log_probs(replace(rollout, routed_experts=None), temperature)[0] if ref is not None else None
    values = critic.values(rollout) if critic is not None else None
    return Passes(trainers, entropies, squares, ref_log_probs, values, experts)


def make_experience(
    cfg: AlgorithmConfig, rollout: Rollout, passes: Passes, kl_coef: float, reused: Reused | None = None
) -> Experience:
    """Returns the experience of a step's scored samples. reused: which of them are from earlier steps."""
    old, is_old_policy = _old_policy(cfg, rollout, passes.log_probs, reused)
    penalty, mean_ref_kl = _ref_kl(cfg.kl, rollout, passes, reused)
    early = None if rollout.token_rewards is None else rollout.dense(rollout.token_rewards)
    rewards = token_rewards.compute(rollout.scores, rollout.response_mask, kl=penalty, kl_coef=kl_coef, early=early)
    correction = None
    if passes.log_probs is not None and cfg.rollout_correction != RolloutCorrectionConfig():
        correction = correction_of(cfg.rollout_correction, rollout, passes.log_probs)
    importance_weights = correction.weights if correction is not None else None
    adv, returns = _advantages(cfg, rollout, rewards, passes, importance_weights)
    return Experience(
        rollout=rollout if passes.experts is None else replace(rollout, routed_experts=passes.experts),
        advantages=rollout.flat(adv),
        returns=rollout.flat(returns),
        old_log_probs=old,
        trainer_log_probs=passes.log_probs,
        ref_log_probs=passes.ref_log_probs,
        values=passes.values,
        mean_ref_kl=mean_ref_kl,
        is_old_policy=is_old_policy,
        entropies=passes.entropies,
        correction=correction,
        reused=reused,
    )


def _old_policy(
    cfg: AlgorithmConfig, rollout: Rollout, trainers: Tensor | None, reused: Reused | None
) -> tuple[Tensor | None, bool]:
    """Returns the old policy's log-probs [R], and whether they are the trainer's own.

    Of samples of earlier steps it is the policy that drew them. With importance weights it is the present one for them
    too, as the weights count how far that is from the one that drew them (decoupled PPO, arXiv 2505.24298).
    """
    is_trainers = cfg.old_log_probs == "trainer"
    old = trainers if is_trainers else rollout.rollout_log_probs
    if reused is None or old is None or cfg.rollout_correction.rollout_is is not None:
        return old, is_trainers
    return torch.where(reused.tokens, reused.old_log_probs, old), False


def _ref_kl(
    cfg: KLConfig, rollout: Rollout, passes: Passes, reused: Reused | None
) -> tuple[Tensor | None, float | None]:
    """The penalty [B, T] on each token's reward and its mean over the new samples; None where there is none."""
    if not cfg.use_in_reward or passes.log_probs is None or passes.ref_log_probs is None:
        return None, None
    penalty = rollout.dense(kl.penalty(cfg.penalty, passes.log_probs, passes.ref_log_probs))
    mask = rollout.response_mask
    new = mask if reused is None else mask & ~reused.samples[:, None]
    return penalty, float(aggregate.agg_loss("seq-mean-token-mean", penalty.double(), new))


def _advantages(
    cfg: AlgorithmConfig, rollout: Rollout, rewards: Tensor, passes: Passes, importance_weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """rewards [B, T], importance_weights [R]; advantages and returns [B, T] by the configured estimator."""

    def dense(flat: Tensor | None) -> Tensor | None:
        return None if flat is None else rollout.dense(flat)

    which, options = chosen_estimator(cfg, has_values=passes.values is not None)
    return advantages.compute(
        which,
        token_rewards=rewards,
        response_mask=rollout.response_mask,
        group=rollout.group,
        values=dense(passes.values),
        greedy_scores=rollout.greedy_scores,
        score_parts=rollout.score_parts,
        log_probs=dense(passes.log_probs),
        sum_pi_squared=dense(passes.sum_pi_squared),
        importance_weights=dense(importance_weights),
        **options,
    )


def chosen_estimator(cfg: AlgorithmConfig, has_values: bool) -> tuple[str | Estimator, dict[str, Any]]:
    """Returns the estimator and its options for `advantages.compute`. Raises FunctionError for a user's function that
    cannot be used."""
    if isinstance(cfg, CustomEstimator):
        return custom.load_custom_estimator(cfg.advantage.function, cfg.advantage.options, has_values), {}
    return cfg.adv_estimator, cfg.own_options


def resampled(cfg: PFPPOConfig | None, exp: Experience, seed: int) -> Experience:
    """Returns the experience that the updates of a step use: resampled where `cfg` asks for it. Depends on (seed,
    step)."""
    if cfg is None:
        return exp
    generator = torch.Generator().manual_seed(sample_seed(seed, RESAMPLING_STREAM + exp.rollout.step, 0))
    scores = exp.rollout.scores
    return exp.pick(resampling.draw(cfg.reweight_method, scores, generator, cfg.weight_pow))


def token_weights(rollout: Rollout, mode: str, scale: float | None = None, keep: Tensor | None = None) -> Tensor:
    """Flat [R] weights of a mini-batch's tokens; sum(weights * loss) is the configured aggregate. keep [R] bool: the
    others neither learn nor count in the aggregate."""
    mask = rollout.response_mask if keep is None else rollout.dense(keep)
    return rollout.flat(aggregate.token_weights(mode, mask, scale))
