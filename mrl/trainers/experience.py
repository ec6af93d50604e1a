"""From scored samples to training targets: log-probs, values, rewards, advantages. The same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algo import advantages, aggregate, kl, rollout_correction, token_rewards
from mrl.config.schema import AlgorithmConfig, RolloutCorrectionConfig
from mrl.core import Rollout
from mrl.learner import Learner
from mrl.learner.policy_copy import PolicyCopy
from mrl.trainers.correction import Correction
from mrl.trainers.replay import Reused

TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")  # they read sums of squared probabilities


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
    mean_ref_kl: float | None
    entropies: Tensor | None = None
    correction: Correction | None = None
    reused: Reused | None = None

    @property
    def is_new(self) -> Tensor:
        """[R] bool: tokens that the policy has drawn that this step began with."""
        return torch.ones_like(self.advantages, dtype=torch.bool) if self.reused is None else ~self.reused.tokens

    @property
    def num_new_samples(self) -> int:
        return self.rollout.num_samples - (int(self.reused.samples.sum()) if self.reused is not None else 0)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the engine's policy against the trainer's, where that is known."""
        if self.trainer_log_probs is None:
            return {}
        gap = mismatch(self.rollout, self.trainer_log_probs, self.is_new)
        return gap | (self.correction.metrics if self.correction is not None else {})

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
    if cfg.adv_estimator in TOKEN_BASELINES:
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
        flat = kl.penalty(cfg.kl.penalty, trainers, ref_log_probs)
        new = flat if reused is None else flat[~reused.tokens]
        penalty, mean_ref_kl = rollout.dense(flat), float(new.mean())
    rewards = token_rewards.compute(rollout.scores, mask, kl=penalty, kl_coef=kl_coef)
    adv, returns = _advantages(cfg, rollout, rewards, values, trainers, squares)
    correction = None
    if trainers is not None and cfg.rollout_correction != RolloutCorrectionConfig():
        correction = Correction.make(cfg.rollout_correction, rollout, trainers)
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
) -> tuple[Tensor, Tensor]:
    """rewards [B, T], the others [R]; advantages and returns [B, T] by the configured estimator."""

    def dense(flat: Tensor | None) -> Tensor | None:
        return None if flat is None else rollout.dense(flat)

    return advantages.compute(
        cfg.adv_estimator,
        token_rewards=rewards,
        response_mask=rollout.response_mask,
        group=rollout.group,
        values=dense(values),
        greedy_scores=rollout.greedy_scores,
        score_parts=rollout.score_parts,
        part_weights=cfg.gdpo_reward_weights,
        log_probs=dense(log_probs),
        sum_pi_squared=dense(sum_pi_squared),
        gamma=cfg.gamma,
        lam=cfg.lam,
        norm_adv_by_std_in_grpo=cfg.norm_adv_by_std_in_grpo,
        whiten=cfg.whiten_advantages,
    )


def needs_forward_pass(cfg: AlgorithmConfig, single_update: bool) -> bool:
    """Whether the trainer's log-probs and entropies must be known before the first update."""
    old_ones = cfg.old_log_probs == "trainer" and not single_update
    corrects = cfg.rollout_correction != RolloutCorrectionConfig()
    return old_ones or corrects or cfg.kl.use_in_reward or cfg.policy_loss.high_entropy_token_ratio < 1


def mismatch(rollout: Rollout, log_probs: Tensor, where: Tensor) -> dict[str, float]:
    """Metrics of the trainer's log-probs [R] against the engine's, at some tokens."""
    gap = rollout_correction.mismatch(log_probs, rollout.rollout_log_probs, where)
    return {f"mismatch/{name}": value for name, value in gap.items()}


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
