"""One update of the actor: targets of its mini-batch, and the checks between backward pass and optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mrl.algo import Sequences, rollout_correction, token_choice
from mrl.inference.seeds import sample_seed
from mrl.learner import losses
from mrl.trainers.rl.experience import Experience, token_weights
from mrl.trainers.rl.run import RLRun

TOKEN_STREAM = 1 << 43  # keeps the choice of tokens apart from every step's samples


def policy_targets(run: RLRun, exp: Experience, number: int) -> losses.PolicyTargets:
    """exp: of the mini-batch alone. number: how many updates of the step came before.

    The step's first update is of the old policy itself: its ratio is 1 then, not what rounding makes of 1, which
    would give a loss of |log-ratio| a gradient."""
    cfg, rollout = run.cfg.algorithm.policy_loss, exp.rollout
    is_old_policy = number == 0 and exp.is_old_policy
    keep = exp.correction.keep if exp.correction is not None else None
    # a ratio of many tokens is of those with one context
    shown, _ = rollout.split_sequences(range(rollout.num_samples))
    sequences = Sequences.of_mask(shown.response_mask, None if keep is None else shown.dense(keep))
    scale = cfg.loss_scale_factor or run.cfg.rollout.sampling.max_new_tokens
    weights = token_weights(rollout, cfg.aggregation, scale, keep)
    mask = torch.ones_like(exp.advantages, dtype=torch.bool) if keep is None else keep
    policy_weights, kl_weights = weights, None
    if exp.correction is not None and exp.correction.weights is not None:
        factors = exp.correction.weights
        if run.cfg.algorithm.kl.bias_correction:  # with the loss's own ratio, that to the policy that generated
            kl_weights = weights * factors
        if cfg.one_weight_a_response and run.cfg.algorithm.rollout_correction.rollout_is == "token":
            factors = rollout_correction.geometric_means(factors, sequences)
        policy_weights = policy_weights * factors
    if (teacher := run.cfg.teacher) is not None and teacher.divergence != "sampled":
        policy_weights = policy_weights * teacher.policy_coef
    if exp.entropies is not None and cfg.high_entropy_token_ratio < 1:
        policy_weights = policy_weights * token_choice.high_entropy(exp.entropies, mask, cfg.high_entropy_token_ratio)
    return losses.PolicyTargets(
        advantages=exp.advantages,
        policy_weights=policy_weights,
        weights=weights,
        mean_weights=token_weights(rollout, "token-mean", keep=keep),
        old_log_probs=None if is_old_policy else exp.old_log_probs,
        ref_log_probs=exp.ref_log_probs,
        sampling_log_probs=rollout.rollout_log_probs if cfg.off_policy_mask_threshold is not None else None,
        kl_weights=kl_weights,
        sequences=replace(sequences, total=run.actor.total_over_context),
        chosen=choose_tokens(run, exp, mask, number),
    )


def choose_tokens(run: RLRun, exp: Experience, mask: Tensor, number: int) -> Tensor | None:
    """Selects tokens of the mini-batch's `mask` for a loss that treats some tokens differently. It needs the log-probs
    of all of them before the update, which the step's first update has already. The same on every rank."""
    loss = run.cfg.algorithm.policy_loss
    if not loss.chooses_tokens:
        return None
    log_probs = exp.trainer_log_probs if number == 0 else None
    if log_probs is None:
        log_probs, _ = run.actor.log_probs(exp.rollout, run.cfg.rollout.sampling.temperature)
    return token_choice.choose(
        loss.loss_mode,
        log_probs=log_probs,
        old_log_probs=log_probs if exp.old_log_probs is None else exp.old_log_probs,
        advantages=exp.advantages,
        mask=mask,
        generator=torch.Generator().manual_seed(sample_seed(run.cfg.run.seed, TOKEN_STREAM + exp.rollout.step, number)),
        **loss.own_options,
    )


def check_samples(run: RLRun, exp: Experience, sample_ids: Sequence[int], number: int) -> dict[str, float]:
    """Metrics of the mini-batch's samples against the engine's, where no pass of its own has told; of the first update
    alone, for which they are exact. exp: of the mini-batch, whose samples are `sample_ids` of the step.
    Collective. Raises MismatchError if other weights drew them."""
    if exp.trainer_log_probs is not None:
        return {}
    log_probs, seen = run.actor.last_outputs.log_probs(exp.rollout)
    drops = run.cfg.actor.lora is not None and run.cfg.actor.lora.dropout > 0
    where = seen & exp.is_new
    metrics = run.mismatch.check(exp.rollout, log_probs, where, sample_ids, run.version, same=number == 0 and not drops)
    return metrics if number == 0 else {}


def drop_if_far(run: RLRun, metrics: dict[str, float]) -> dict[str, float]:
    """TRL's ratio_threshold: the actor's whole loss on a mini-batch that the policy has moved too far from counts 0
    times. The optimizer still makes its step, by momentum and weight decay alone. (TRL's model is the critic too, and
    its loss is dropped as well; here the critic learns.)"""
    threshold = run.cfg.algorithm.ratio_threshold
    if threshold is None:
        return {}
    is_far = metrics["actor/ratio"] > threshold
    if is_far:
        run.actor.scale_gradients(0.0)
    return {"actor/loss_zeroed": float(is_far)}
