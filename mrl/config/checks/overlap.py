"""Checks of asynchronous training and partial rollouts: what they require, and which settings they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import without_effect
from mrl.config.engines import ENGINES
from mrl.config.problems import Problem
from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import samples_per_step

OVERLAP, SEGMENT, OVERSAMPLE = "rollout.overlap", "rollout.segment_tokens", "rollout.oversample"
STALENESS, EARLY = "rollout.max_staleness", "rollout.early_passes"
CORRECTION, OLD = "algorithm.rollout_correction.rollout_is", "algorithm.old_log_probs"


def check(cfg: RLConfig) -> Iterator[Problem]:
    if cfg.rollout.is_behind:
        yield from _learning(cfg, OVERLAP if cfg.rollout.overlap != "none" else SEGMENT)
    if cfg.rollout.overlap != "none":
        yield from _ahead(cfg)
    if cfg.rollout.overlap == "bounded":
        yield from _bounded(cfg)
    else:
        yield from without_effect(
            cfg.rollout, "rollout", ["max_staleness"], "responses do not span weight syncs", OVERLAP
        )
    if cfg.rollout.segment_tokens is None:
        yield from without_effect(cfg.rollout, "rollout", ["oversample"], "there are no partial rollouts", SEGMENT)
    else:
        yield from _segments(cfg, cfg.rollout.segment_tokens)
    if cfg.rollout.early_passes is not None:
        yield from _early(cfg, cfg.rollout.early_passes)


def _learning(cfg: RLConfig, key: str) -> Iterator[Problem]:
    """Checks that the loss corrects for off-policy samples."""
    algorithm = cfg.algorithm
    if algorithm.old_log_probs != "engine" and algorithm.rollout_correction.rollout_is is None:
        message = (
            f"required with {key}, whose samples are off-policy: set token (decoupled PPO, truncated at 2), or "
            f"{OLD}: engine"
        )
        yield Problem((CORRECTION, key, OLD), message)
    elif algorithm.old_log_probs == "engine" and not algorithm.policy_loss.uses_ratio:
        message = f"{algorithm.policy_loss.loss_mode} has no ratio to correct off-policy samples: use another loss_mode"
        yield Problem(("algorithm.policy_loss.loss_mode", OLD, key), message)


def _ahead(cfg: RLConfig) -> Iterator[Problem]:
    if cfg.rollout.release != "none":
        message = f"{cfg.rollout.release}: engines that release memory for training cannot generate meanwhile: use none"
        yield Problem(("rollout.release", OVERLAP), message)
    if cfg.reward.model is not None:
        message = "the ranks that score samples with it train during generation: leave rollout.overlap out"
        yield Problem(("reward.model", OVERLAP), message)


def _bounded(cfg: RLConfig) -> Iterator[Problem]:
    """Checks fully asynchronous rollout, whose responses continue across weight syncs."""
    rollout = cfg.rollout
    if rollout.max_staleness is None:
        message = (
            "required with bounded: set the maximum number of steps between start and training of a response (0: no "
            "overlap)"
        )
        yield Problem((STALENESS, OVERLAP), message)
    if not ENGINES[rollout.engine].pauses:
        message = f"{rollout.engine} cannot update weights in the middle of a response: use one_step"
        yield Problem((OVERLAP, "rollout.engine"), message)
    if cfg.actor.lora is not None and cfg.sync.lora == "adapter":
        message = "requests in flight still use the old adapter at a weight sync: set sync.lora: merge"
        yield Problem(("sync.lora", OVERLAP), message)
    if rollout.quantization != "none":
        message = "in-flight weight updates are not supported for fp8 weights: set quantization: none, or one_step"
        yield Problem(("rollout.quantization", OVERLAP), message)
    if rollout.segment_tokens is not None:
        yield Problem((SEGMENT, OVERLAP), "with bounded, responses continue across weight syncs anyway: leave it out")
    yield from _greedy(cfg, OVERLAP)


def _early(cfg: RLConfig, parts: int) -> Iterator[Problem]:
    """Checks passes over a step's first samples while engines generate the others."""
    rollout, samples = cfg.rollout, samples_per_step(cfg)
    if not cfg.step_size().passes:
        yield Problem((EARLY,), "has no effect: there are no forward passes before the first update")
    if parts > samples:
        yield Problem((EARLY, "batch.prompts_per_step"), f"{parts} parts exceed the {samples} samples of a step")
    not_known = "the samples to train on are only known once all are generated"
    others = {
        OVERLAP: (rollout.overlap != "none", "the ranks train while the next samples are generated"),
        SEGMENT: (rollout.segment_tokens is not None, not_known),
        "algorithm.filter_groups": (cfg.algorithm.filter_groups.is_on, not_known),
        "replay": (cfg.replay is not None, not_known),
        "agent": (cfg.agent is not None, not_known),
        "actor.routing_replay": (cfg.actor.routing_replay != "off", "routing replay needs all samples at once"),
        "rollout.release": (rollout.release != "none", "models and engines use the memory in turns"),
    }
    for name, model in cfg.built().items():
        key = f"{'reward.model' if name == 'reward' else name}.offload"
        others[key] = model.train.offload != "none", "models and engines use the memory in turns"
    for key, (is_set, why) in others.items():
        if is_set:
            yield Problem((EARLY, key), f"{why}: leave it out")


def _greedy(cfg: RLConfig, key: str) -> Iterator[Problem]:
    """Checks for settings that need greedy responses of the weights that generated the others."""
    if cfg.algorithm.needs_greedy:
        message = f"{cfg.algorithm.adv_estimator} needs a greedy response of the same weights: use another estimator"
        yield Problem(("algorithm.adv_estimator", key), message)


def _segments(cfg: RLConfig, tokens: int) -> Iterator[Problem]:
    rollout, most = cfg.rollout, cfg.rollout.sampling.max_new_tokens
    if most % tokens:
        message = f"{tokens} does not divide {most}: choose a divisor, since all segments have the same maximum"
        yield Problem((SEGMENT, "rollout.sampling.max_new_tokens"), message)
    if rollout.oversample == 1:
        message = "must be above 1: otherwise a step waits for all its groups, and no response continues in the next"
        yield Problem((OVERSAMPLE, SEGMENT), message)
    if rollout.sampling.stop:
        message = "a stop text could span two segments: leave it out"
        yield Problem(("rollout.sampling.stop", SEGMENT), message)
    if cfg.algorithm.filter_groups.is_on:
        message = "groups that continue in the next step cannot be filtered: leave it out"
        yield Problem(("algorithm.filter_groups", SEGMENT), message)
    yield from _greedy(cfg, SEGMENT)
    if cfg.agent is not None:
        yield Problem(("agent", SEGMENT), "partial rollouts do not support the turns of an agent: leave it out")
