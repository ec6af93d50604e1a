"""From scored samples to training targets: log-probs, values, rewards, advantages. The same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrl.algo import advantages, aggregate, kl, own, resampling, token_rewards
from mrl.algo.advantages import Estimator
from mrl.algo.rollout_correction import Correction
from mrl.config.schema import AlgorithmConfig, PFPPOConfig, RolloutCorrectionConfig
from mrl.core import Rollout
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy
from mrl.options.estimators import OwnEstimator
from mrl.rollout.seeds import sample_seed
from mrl.trainers.correction import correction_of
from mrl.trainers.replay import Reused

RESAMPLING_STREAM = 1 << 44  # keeps the draws of samples apart from all others


@dataclass(frozen=True)
class Experience:
    """Flat [R] vectors of one step.

    trainer_log_probs, entropies: the trainer's, of the policy at the start of the step; None: nothing needs them before
    the first update computes them anyway. old_log_probs None: see mrl.learner.losses.PolicyTargets
    """

    rollout: Rollout
    advantages: Tensor
    returns: Tensor
    old_log_probs: Tensor | None
    trainer_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    values: Tensor | None
    mean_ref_kl: float | None  # mean over the new responses of each one's token mean, as verl's controller takes it
    entropies: Tensor | None = None
    correction: Correction | None = None
    reused: Reused | None = None

    @property
    def is_new(self) -> Tensor:
        """[R] bool: tokens that the policy has drawn that this step began with."""
        return torch.ones_like(self.advantages, dtype=torch.bool) if self.reused is None else ~self.reused.tokens

    @property
    def is_old_policy(self) -> bool:
        """Whether the old log-probs are the trainer's own."""
        return self.old_log_probs is self.trainer_log_probs

    @property
    def num_new_samples(self) -> int:
        return self.rollout.num_samples - (int(self.reused.samples.sum()) if self.reused is not None else 0)

    @property
    def metrics(self) -> dict[str, float]:
        return self.correction.metrics if self.correction is not None else {}

    def pick(self, samples: Tensor) -> Experience:
        """Of some of the samples, in the order of `samples` [b] int64, which may name one more than once."""

        def of(vector: Tensor) -> Tensor:
            return self.rollout.flat_of(samples, vector)

        changes: dict[str, Any] = {name: of(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        if self.is_old_policy:
            changes["old_log_probs"] = changes.get("trainer_log_probs")
        if (made := self.correction) is not None:
            weights = None if made.weights is None else of(made.weights)
            changes["correction"] = replace(made, weights=weights, keep=of(made.keep))
        if (old := self.reused) is not None:
            changes["reused"] = Reused(old.samples[samples], of(old.tokens), of(old.old_log_probs))
        return replace(self, rollout=self.rollout.pick(samples), **changes)

    def targets(self) -> list[Tensor]:
        """All flat vectors that a loss may be made of."""
        maybe = (self.old_log_probs, self.trainer_log_probs, self.ref_log_probs, self.values)
        return [self.advantages, self.returns, *(vector for vector in maybe if vector is not None)]


def make_experience(
    cfg: AlgorithmConfig,
    temperature: float,
    rollout: Rollout,
    actor: Learner,
    critic: Learner | None,
    ref: Learner | PolicyCopy | None,
    kl_coef: float,
    single_update: bool,
    reused: Reused | None = None,
) -> Experience:
    """`single_update`: the step makes one update from these samples, so the ratio to the old policy is 1 by itself
    and the separate forward pass for old log-probs is not needed (unless something else needs it).

    reused: samples of earlier steps among these. All about them is computed anew, except their old log-probs: those are
    of the policy that drew them. With importance weights the old policy is the present one for them too, as the weights
    count how far that is from the one that drew them (decoupled PPO, arXiv 2505.24298).
    """
    trainers = entropies = squares = None
    if cfg.needs_distribution:
        trainers, entropies, squares = actor.distribution(rollout, temperature)
    elif needs_forward_pass(cfg, single_update):
        trainers, entropies = actor.log_probs(rollout, temperature)
    old = rollout.rollout_log_probs if cfg.old_log_probs == "engine" else trainers
    if reused is not None and old is not None and cfg.rollout_correction.rollout_is is None:
        old = torch.where(reused.tokens, reused.old_log_probs, old)
    ref_log_probs = ref.log_probs(rollout, temperature)[0] if ref is not None else None
    values = critic.values(rollout) if critic is not None else None

    mask, penalty, mean_ref_kl = rollout.response_mask, None, None
    if cfg.kl.use_in_reward and trainers is not None and ref_log_probs is not None:
        penalty = rollout.dense(kl.penalty(cfg.kl.penalty, trainers, ref_log_probs))
        new = mask if reused is None else mask & ~reused.samples[:, None]
        mean_ref_kl = float(aggregate.agg_loss("seq-mean-token-mean", penalty.double(), new))
    rewards = token_rewards.compute(rollout.scores, mask, kl=penalty, kl_coef=kl_coef)
    correction = None
    if trainers is not None and cfg.rollout_correction != RolloutCorrectionConfig():
        correction = correction_of(cfg.rollout_correction, rollout, trainers)
    importance_weights = correction.weights if correction is not None else None
    adv, returns = _advantages(cfg, rollout, rewards, values, trainers, squares, importance_weights)
    return Experience(
        rollout=rollout,
        advantages=rollout.flat(adv),
        returns=rollout.flat(returns),
        old_log_probs=old,
        trainer_log_probs=trainers,
        ref_log_probs=ref_log_probs,
        values=values,
        mean_ref_kl=mean_ref_kl,
        entropies=entropies,
        correction=correction,
        reused=reused,
    )


def _advantages(
    cfg: AlgorithmConfig,
    rollout: Rollout,
    rewards: Tensor,
    values: Tensor | None,
    log_probs: Tensor | None,
    sum_pi_squared: Tensor | None,
    importance_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """rewards [B, T], the others [R]; advantages and returns [B, T] by the configured estimator."""

    def dense(flat: Tensor | None) -> Tensor | None:
        return None if flat is None else rollout.dense(flat)

    which, options = chosen_estimator(cfg, has_values=values is not None)
    return advantages.compute(
        which,
        token_rewards=rewards,
        response_mask=rollout.response_mask,
        group=rollout.group,
        values=dense(values),
        greedy_scores=rollout.greedy_scores,
        score_parts=rollout.score_parts,
        log_probs=dense(log_probs),
        sum_pi_squared=dense(sum_pi_squared),
        importance_weights=dense(importance_weights),
        **options,
    )


def chosen_estimator(cfg: AlgorithmConfig, has_values: bool) -> tuple[str | Estimator, dict[str, Any]]:
    """What `advantages.compute` is called with: the estimator and its options. FunctionError for a user's own that
    cannot be used."""
    if isinstance(cfg, OwnEstimator):
        return own.load_estimator(cfg.advantage.function, cfg.advantage.options, has_values), {}
    return cfg.adv_estimator, cfg.own_options


def resampled(cfg: PFPPOConfig | None, exp: Experience, seed: int) -> Experience:
    """What the updates of a step learn from: samples drawn anew where `cfg` asks for it. Follows from (seed, step)."""
    if cfg is None:
        return exp
    generator = torch.Generator().manual_seed(sample_seed(seed, RESAMPLING_STREAM + exp.rollout.step, 0))
    scores = exp.rollout.scores
    return exp.pick(resampling.draw(cfg.reweight_method, scores, generator, cfg.weight_pow))


def needs_forward_pass(cfg: AlgorithmConfig, single_update: bool) -> bool:
    """Whether the trainer's log-probs and entropies must be known before the first update."""
    old_ones = cfg.old_log_probs == "trainer" and not single_update
    corrects = cfg.rollout_correction != RolloutCorrectionConfig()
    return old_ones or corrects or cfg.kl.use_in_reward or cfg.policy_loss.high_entropy_token_ratio < 1


def minibatch_mask(rollout: Rollout, sample_ids: range, keep: Tensor | None = None) -> Tensor:
    """Which tokens are of the mini-batch, [R] bool. keep [R] bool: only of these."""
    chosen = torch.zeros(rollout.num_samples, dtype=torch.bool)
    chosen[sample_ids.start : sample_ids.stop] = True
    inside = chosen.repeat_interleave(rollout.response_lens)
    return inside if keep is None else inside & keep


def minibatch_weights(
    rollout: Rollout, sample_ids: range, mode: str, scale: float | None = None, keep: Tensor | None = None
) -> Tensor:
    """Flat [R] weights of the mini-batch's tokens, 0 outside it; sum(weights * loss) is the configured aggregate.
    keep [R] bool: the others neither learn nor count in the aggregate."""
    mask = rollout.dense(minibatch_mask(rollout, sample_ids, keep))
    return rollout.flat(aggregate.token_weights(mode, mask, scale))
