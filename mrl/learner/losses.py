"""The training losses as sums over response tokens, built once a mini-batch from flat vectors.

Each takes the model's output at some tokens and those tokens' places in the flat vectors of the step (`dest`); all
per-token inputs are looked up there. The weights hold the one global denominator of the mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.algo import kl, policy_loss, value_loss
from mrl.config.schema import KLConfig, PolicyLossConfig, ValueLossConfig
from mrl.learner.learner import Loss, LossParts


@dataclass(frozen=True)
class PolicyTargets:
    """Flat [R] vectors of a step. `old_log_probs` None: the update is the step's first and only one, the ratio is 1.

    trainer_log_probs: the trainer's own, of the policy that sampled; None: the update is the first one, so these are
    the ones it computes anyway. `weights` sum a token loss to the configured aggregate, `mean_weights` to the mean over
    the mini-batch's tokens.
    """

    advantages: Tensor
    weights: Tensor
    mean_weights: Tensor
    rollout_log_probs: Tensor
    old_log_probs: Tensor | None
    trainer_log_probs: Tensor | None
    ref_log_probs: Tensor | None


POLICY_SUMS = (
    "actor/pg_loss",
    "actor/entropy",
    "actor/clipfrac",
    "actor/ppo_kl",
    "actor/clipfrac_lower",
    "actor/ref_kl",
    "mismatch/mean_abs",
    "mismatch/kl",
)


def policy(cfg: PolicyLossConfig, kl_cfg: KLConfig, kl_coef: float, t: PolicyTargets) -> Loss:
    """The policy loss - entropy_coef * entropy + kl_coef * KL(actor, ref)."""

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        log_probs, entropy = output[0], output[1]
        weights, mean = t.weights[dest], t.mean_weights[dest]
        old = log_probs.detach() if t.old_log_probs is None else t.old_log_probs[dest]
        loss, metrics = policy_loss.compute(
            cfg.loss_mode,
            log_probs=log_probs,
            old_log_probs=old,
            advantages=t.advantages[dest],
            weights=weights,
            metric_weights=mean,
            **cfg.options,
        )
        pg_loss = loss.detach()
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * (weights * entropy).sum()
        ref_kl = torch.zeros((), device=loss.device)
        if t.ref_log_probs is not None:
            penalty = kl.penalty(kl_cfg.penalty, log_probs, t.ref_log_probs[dest])
            ref_kl = (mean * penalty.detach()).sum()
            if kl_cfg.use_in_loss:
                loss = loss + kl_coef * (weights * penalty).sum()
        trainers = log_probs.detach() if t.trainer_log_probs is None else t.trainer_log_probs[dest]
        gap = trainers - t.rollout_log_probs[dest]
        sums = [
            pg_loss,
            (mean * entropy.detach()).sum(),
            metrics["clipfrac"],
            metrics["ppo_kl"],
            metrics["clipfrac_lower"],
            ref_kl,
            (mean * gap.abs()).sum(),
            (mean * -gap).sum(),
        ]
        biggest = gap.abs().max() if gap.numel() else torch.zeros((), device=loss.device)
        return LossParts(loss, sums, [biggest])

    return Loss(compute, POLICY_SUMS, ("mismatch/max_abs",))


def value(cfg: ValueLossConfig, old_values: Tensor, returns: Tensor, weights: Tensor, mean_weights: Tensor) -> Loss:
    """Clipped squared error to the returns."""

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        loss, metrics = value_loss.compute(
            values=output[0],
            old_values=old_values[dest],
            returns=returns[dest],
            weights=weights[dest],
            metric_weights=mean_weights[dest],
            cliprange_value=cfg.cliprange_value,
        )
        mean_value = (mean_weights[dest] * output[0].detach()).sum()
        return LossParts(loss, [metrics["vf_clipfrac"], mean_value], [])

    return Loss(compute, ("critic/clipfrac", "critic/value_mean"))


def cross_entropy(weights: Tensor) -> Loss:
    """Negative log-likelihood of the response tokens (supervised fine-tuning)."""

    def compute(output: Tensor, dest: Tensor) -> LossParts:
        w = weights[dest]
        return LossParts(-(w * output[0]).sum(), [(w * output[1].detach()).sum()], [])

    return Loss(compute, ("actor/entropy",))
