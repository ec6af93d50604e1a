"""Checks of asynchronous training and partial rollouts: what they require, and which settings they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import without_effect
from mrl.config.problems import Problem
from mrl.config.schema import RLConfig
from mrl.config.trainers.base import section_of
from mrl.config.trainers.rl import samples_per_step

STALENESS, INTERRUPT, ORDER = "rollout.max_staleness", "rollout.interrupt", "rollout.order"
SEGMENT, OVERSAMPLE, EARLY = "rollout.segment_tokens", "rollout.oversample", "rollout.early_passes"
CORRECTION, OLD = "algorithm.rollout_correction.rollout_is", "algorithm.old_log_probs"


def check(cfg: RLConfig) -> Iterator[Problem]:
    rollout, algorithm = cfg.rollout, cfg.algorithm
    key = STALENESS if rollout.max_staleness else INTERRUPT
    if rollout.is_behind and algorithm.old_log_probs != "engine":
        if algorithm.rollout_correction.rollout_is is None:
            what = f"required with {key}, whose samples are off-policy"
            message = f"{what}: set token (decoupled PPO, truncated at 2), or {OLD}: engine"
            yield Problem((CORRECTION, key, OLD), message)
    elif rollout.is_behind and not algorithm.policy_loss.uses_ratio:
        message = f"{algorithm.policy_loss.loss_mode} has no ratio to correct off-policy samples: use another loss_mode"
        yield Problem(("algorithm.policy_loss.loss_mode", OLD, key), message)
    if rollout.max_staleness and rollout.release != "none":
        message = f"{rollout.release}: engines that release memory for training cannot generate meanwhile: use none"
        yield Problem(("rollout.release", STALENESS), message)
    if rollout.max_staleness and cfg.reward.model is not None:
        message = "the ranks that score samples with it train during generation: leave rollout.max_staleness out"
        yield Problem(("reward.model", STALENESS), message)
    if rollout.interrupt == "at_sync" and not rollout.max_staleness:
        message = "has no effect: a synchronous run has no response in flight at a weight sync: set max_staleness, or "
        yield Problem((INTERRUPT, STALENESS), f"{message}leave interrupt out")
    if rollout.interrupt == "at_step_end":
        yield from _partial_rollouts(cfg)
    else:
        why = "responses do not continue in the next step without interrupt: at_step_end"
        yield from without_effect(rollout, "rollout", ["segment_tokens", "oversample"], why, INTERRUPT)
    if rollout.order == "first_done":
        if rollout.interrupt == "at_step_end":
            message = "has no effect: with interrupt: at_step_end a step trains on the groups that end first anyway"
            yield Problem((ORDER, INTERRUPT), f"{message}; leave it out")
        elif not rollout.max_staleness:
            yield Problem((ORDER, STALENESS), "has no effect: a step trains on all groups of a synchronous run")
        if algorithm.filter_groups.is_on:
            message = "the kept groups are the first that pass, in the order of their prompts: use order: fifo"
            yield Problem((ORDER, "algorithm.filter_groups"), message)
    mixes_weights = rollout.max_staleness > 1 or rollout.interrupt != "never"
    if rollout.is_behind and mixes_weights and algorithm.needs_greedy:
        message = f"{algorithm.adv_estimator} needs a greedy response of the same weights: use another estimator"
        key = STALENESS if rollout.interrupt == "never" else INTERRUPT
        yield Problem(("algorithm.adv_estimator", key), message)
    if rollout.early_passes is not None:
        yield from _early(cfg, rollout.early_passes)


def _early(cfg: RLConfig, parts: int) -> Iterator[Problem]:
    """Checks passes over a step's first samples while engines generate the others."""
    rollout, samples = cfg.rollout, samples_per_step(cfg)
    if not cfg.step_size().passes:
        yield Problem((EARLY,), "has no effect: there are no forward passes before the first update")
    if parts > samples:
        yield Problem((EARLY, "batch.prompts_per_step"), f"{parts} parts exceed the {samples} samples of a step")
    not_known = "the samples to train on are only known once all are generated"
    in_turns = "models and engines use the memory in turns"
    others = {
        STALENESS: (rollout.max_staleness > 0, "the ranks train while the next samples are generated"),
        INTERRUPT: (rollout.interrupt == "at_step_end", not_known),
        "algorithm.filter_groups": (cfg.algorithm.filter_groups.is_on, not_known),
        "replay": (cfg.replay is not None, not_known),
        "agent": (cfg.agent is not None, not_known),
        "actor.routing_replay": (cfg.actor.routing_replay != "off", "routing replay needs all samples at once"),
        "rollout.release": (rollout.release != "none", in_turns),
    }
    for name, model in cfg.built().items():
        others[f"{section_of(name)}.offload"] = model.train.offload != "none", in_turns
    for key, (is_set, why) in others.items():
        if is_set:
            yield Problem((EARLY, key), f"{why}: leave it out")


def _partial_rollouts(cfg: RLConfig) -> Iterator[Problem]:
    rollout, most = cfg.rollout, cfg.rollout.sampling.max_new_tokens
    if rollout.oversample == 1:
        message = "must be above 1: otherwise a step waits for all its groups, and no response continues in the next"
        yield Problem((OVERSAMPLE, INTERRUPT), message)
    if cfg.algorithm.filter_groups.is_on:
        message = "groups that continue in the next step cannot be filtered: leave it out"
        yield Problem(("algorithm.filter_groups", INTERRUPT), message)
    if (tokens := rollout.segment_tokens) is None:
        if rollout.max_staleness:
            message = "responses that end early with their step are not generated during training: use at_sync"
            yield Problem((INTERRUPT, STALENESS), f"{message}, or set segment_tokens")
        return
    if most % tokens:
        message = f"{tokens} does not divide {most}: choose a divisor, since all segments have the same maximum"
        yield Problem((SEGMENT, "rollout.sampling.max_new_tokens"), message)
    if rollout.sampling.stop:
        message = "a stop text could span two segments: leave it out"
        yield Problem(("rollout.sampling.stop", SEGMENT), message)
    if cfg.agent is not None:
        yield Problem(("agent", SEGMENT), "segments do not support the turns of an agent: leave segment_tokens out")
