"""Checks of the policy loss, rollout correction and early stopping: contradictions, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import without_effect
from mrl.config.checks.reward import check_function
from mrl.config.problems import Problem
from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import most_updates_per_step
from mrl.options.losses import CustomLoss

LOSS, VALUE_LOSS, CORRECTION = "algorithm.policy_loss", "algorithm.value_loss", "algorithm.rollout_correction"
ONE_UPDATE = "a step makes one update from the trainer's own log-probs, so all ratios are 1"


def check(cfg: RLConfig) -> Iterator[Problem]:
    for keys, message in cfg.algorithm.policy_loss.problems():
        yield Problem(tuple(f"{LOSS}.{key}" for key in keys), message)
    yield from _entropy(cfg)
    yield from _aggregation(cfg)
    yield from _importance_weights(cfg)
    yield from _rejection(cfg)
    yield from _controls(cfg)


def check_file(cfg: RLConfig) -> Iterator[Problem]:
    """Checks that the file defines a custom loss; parses the file, without running it."""
    loss = cfg.algorithm.policy_loss
    if isinstance(loss, CustomLoss):
        yield from check_function(f"{LOSS}.function", loss.function, ("inputs",), named=[*loss.options])


def _entropy(cfg: RLConfig) -> Iterator[Problem]:
    loss, end, steps = cfg.algorithm.policy_loss, f"{LOSS}.entropy_coef_end", f"{LOSS}.entropy_coef_steps"
    if loss.entropy_coef_end is None:
        yield from without_effect(loss, LOSS, ["entropy_coef_steps"], "entropy_coef is constant", end)
    elif loss.entropy_coef_steps is None:
        yield Problem((steps, end), "required: set the number of steps until entropy_coef_end is reached")
    elif loss.entropy_coef_end == loss.entropy_coef:
        message = f"has no effect: entropy_coef is {loss.entropy_coef} from the start"
        yield Problem((end, f"{LOSS}.entropy_coef"), message)


def _aggregation(cfg: RLConfig) -> Iterator[Problem]:
    loss, value_loss, norm = cfg.algorithm.policy_loss, cfg.algorithm.value_loss, "seq-mean-token-sum-norm"
    if loss.is_fixed_aggregate and loss.aggregation != loss.usual_aggregate:
        what = f"{loss.loss_mode} is defined with {loss.usual_aggregate}, and {loss.aggregation} would change the loss"
        yield Problem((f"{LOSS}.loss_agg_mode", f"{LOSS}.loss_mode"), f"{what}: leave it out")
    for section, key, mode in ((loss, LOSS, loss.aggregation), (value_loss, VALUE_LOSS, value_loss.loss_agg_mode)):
        if mode != norm:
            because = f"the aggregation is {mode}"
            yield from without_effect(section, key, ["loss_scale_factor"], because, f"{key}.loss_agg_mode")


def _importance_weights(cfg: RLConfig) -> Iterator[Problem]:
    correction, where = cfg.algorithm.rollout_correction, f"{CORRECTION}.rollout_is"
    if correction.rollout_is is None:
        names = ["rollout_is_threshold", "rollout_is_batch_normalize"]
        yield from without_effect(correction, CORRECTION, names, "there are no importance weights", where)
        return
    try:
        correction.importance_bounds()
    except ValueError as error:
        yield Problem((f"{where}_threshold",), str(error))
    if cfg.algorithm.old_log_probs == "engine":
        message = "the ratio of the loss is already to the engine's policy: leave rollout_is out, or it counts twice"
        yield Problem((where, "algorithm.old_log_probs"), message)
    elif (loss := cfg.algorithm.policy_loss).uses_whole_ratio:
        weighs = f"{loss.loss_mode} weights a response by its whole ratio"
        message = f"{weighs}: set old_log_probs: engine instead to correct for the engine's policy"
        yield Problem((where, f"{LOSS}.loss_mode"), message)


def _rejection(cfg: RLConfig) -> Iterator[Problem]:
    correction, where = cfg.algorithm.rollout_correction, f"{CORRECTION}.rollout_rs"
    threshold = f"{where}_threshold"
    if not correction.rollout_rs:
        yield from without_effect(correction, CORRECTION, ["rollout_rs_threshold"], "nothing is rejected", where)
    elif not correction.rollout_rs_threshold:
        yield Problem((threshold, where), "required: set the bound of each criterion")
    else:
        try:
            correction.criteria()
        except ValueError as error:
            yield Problem((threshold, where), str(error))


def _controls(cfg: RLConfig) -> Iterator[Problem]:
    algorithm, batch = cfg.algorithm, "batch.samples_per_minibatch"
    always_new = cfg.replay is None or algorithm.rollout_correction.rollout_is is not None
    one_update = most_updates_per_step(cfg) == 1 and algorithm.old_log_probs == "trainer" and always_new
    if one_update:
        yield from without_effect(algorithm, "algorithm", ["ratio_threshold"], ONE_UPDATE, batch)
    if one_update and algorithm.policy_loss.needs_moved_policy:
        yield Problem((f"{LOSS}.loss_mode", batch), f"{algorithm.policy_loss.loss_mode} has no effect: {ONE_UPDATE}")
    if cfg.batch.epochs_per_step == 1:
        because = "a step has only one epoch"
        yield from without_effect(algorithm, "algorithm", ["target_kl"], because, "batch.epochs_per_step")
    threshold = algorithm.ratio_threshold
    if threshold is not None and threshold <= 1:
        message = f"must be above 1 (the ratio of equal policies), got {threshold}"
        yield Problem(("algorithm.ratio_threshold",), message)
