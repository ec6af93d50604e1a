"""From scored samples to training targets: log-probs, values, rewards, advantages. The same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algo import advantages, aggregate, kl, token_rewards
from mrl.config.schema import AlgorithmConfig
from mrl.core import Rollout
from mrl.learner import Learner


@dataclass(frozen=True)
class Experience:
    """Flat [R] vectors of one step. `old_log_probs`, `trainer_log_probs` None: see mrl.learner.losses.PolicyTargets."""

    rollout: Rollout
    advantages: Tensor
    returns: Tensor
    old_log_probs: Tensor | None
    trainer_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    values: Tensor | None
    mean_ref_kl: float | None

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
    ref: Learner | None,
    kl_coef: float,
    single_update: bool,
) -> Experience:
    """`single_update`: the step makes one update from these samples, so the ratio to the old policy is 1 by itself
    and the separate forward pass for old log-probs is not needed (unless the KL reward needs it)."""
    trainers = None
    if cfg.kl.use_in_reward or not (single_update or cfg.old_log_probs == "engine"):
        trainers, _ = actor.log_probs(rollout, temperature)
    old = rollout.rollout_log_probs if cfg.old_log_probs == "engine" else trainers
    ref_log_probs = ref.log_probs(rollout, temperature)[0] if ref is not None else None
    values = critic.values(rollout) if critic is not None else None

    mask, penalty, mean_ref_kl = rollout.response_mask, None, None
    if cfg.kl.use_in_reward and trainers is not None and ref_log_probs is not None:
        flat = kl.penalty(cfg.kl.penalty, trainers, ref_log_probs)
        penalty, mean_ref_kl = rollout.dense(flat), float(flat.mean())
    adv, returns = advantages.compute(
        cfg.adv_estimator,
        token_rewards=token_rewards.compute(rollout.scores, mask, kl=penalty, kl_coef=kl_coef),
        values=rollout.dense(values) if values is not None else None,
        response_mask=mask,
        group=rollout.group,
        gamma=cfg.gamma,
        lam=cfg.lam,
        norm_adv_by_std_in_grpo=cfg.norm_adv_by_std_in_grpo,
    )
    return Experience(
        rollout, rollout.flat(adv), rollout.flat(returns), old, trainers, ref_log_probs, values, mean_ref_kl
    )


def minibatch_weights(rollout: Rollout, sample_ids: range, mode: str, scale: float | None = None) -> Tensor:
    """Flat [R] weights of the mini-batch's tokens, 0 outside it; sum(weights * loss) is the configured aggregate."""
    chosen = torch.zeros(rollout.num_samples, dtype=torch.bool)
    chosen[sample_ids.start : sample_ids.stop] = True
    return rollout.flat(aggregate.token_weights(mode, rollout.response_mask & chosen[:, None], scale))
