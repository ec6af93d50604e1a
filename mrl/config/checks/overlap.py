"""Samples of older weights than the trainer's: what has to be there for that, and what goes against it."""

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
            cfg.rollout, "rollout", ["max_staleness"], "responses do not go on over pushes", OVERLAP
        )
    if cfg.rollout.segment_tokens is None:
        yield from without_effect(cfg.rollout, "rollout", ["oversample"], "responses are drawn at once", SEGMENT)
    else:
        yield from _segments(cfg, cfg.rollout.segment_tokens)
    if cfg.rollout.early_passes is not None:
        yield from _early(cfg, cfg.rollout.early_passes)


def _learning(cfg: RLConfig, key: str) -> Iterator[Problem]:
    """From samples of other weights than the trainer's."""
    algorithm = cfg.algorithm
    if algorithm.old_log_probs != "engine" and algorithm.rollout_correction.rollout_is is None:
        message = (
            f"required with {key}, whose samples are of older weights than the trainer's: token weighs that (decoupled "
            f"PPO, cut at 2); or take {OLD}: engine"
        )
        yield Problem((CORRECTION, key, OLD), message)
    elif algorithm.old_log_probs == "engine" and not algorithm.policy_loss.uses_ratio:
        message = f"{algorithm.policy_loss.loss_mode} has no ratio that would count how old the samples are"
        yield Problem(("algorithm.policy_loss.loss_mode", OLD, key), message)


def _ahead(cfg: RLConfig) -> Iterator[Problem]:
    if cfg.rollout.release != "none":
        message = f"{cfg.rollout.release}: engines that give memory up to the trainer cannot sample while it computes"
        yield Problem(("rollout.release", OVERLAP), message)
    if cfg.reward.model is not None:
        message = "the ranks score samples with it, and compute something else while those are drawn: leave overlap out"
        yield Problem(("reward.model", OVERLAP), message)


def _bounded(cfg: RLConfig) -> Iterator[Problem]:
    """Responses that go on over pushes."""
    rollout = cfg.rollout
    if rollout.max_staleness is None:
        message = (
            "required with bounded: how many steps after it was begun a response is learnt at most; 0 is no overlap"
        )
        yield Problem((STALENESS, OVERLAP), message)
    if not ENGINES[rollout.engine].pauses:
        message = f"{rollout.engine} cannot stop in the middle of a response and go on by other weights: one_step"
        yield Problem((OVERLAP, "rollout.engine"), message)
    if cfg.actor.lora is not None and cfg.sync.lora == "adapter":
        message = "an adapter cannot be taken from requests that use it, which go on over pushes: merge"
        yield Problem(("sync.lora", OVERLAP), message)
    if rollout.quantization != "none":
        message = "weights in fp8 have not been pushed under responses that go on yet: none, or one_step"
        yield Problem(("rollout.quantization", OVERLAP), message)
    if rollout.segment_tokens is not None:
        yield Problem((SEGMENT, OVERLAP), "responses go on over pushes as they are: leave it out")
    yield from _whole_steps(
        cfg, OVERLAP, "groups are learnt in the order in which they were begun, none is passed over"
    )


def _early(cfg: RLConfig, parts: int) -> Iterator[Problem]:
    """Passes over a step's first samples while others are drawn."""
    rollout, samples = cfg.rollout, samples_per_step(cfg)
    if not cfg.step_size().passes:
        yield Problem((EARLY,), "has no effect: nothing is asked of the models before the first update")
    if parts > samples:
        yield Problem((EARLY, "batch.prompts_per_step"), f"{parts} parts of the {samples} samples of a step")
    not_known = "which samples a step learns from is known when all are there"
    others = {
        OVERLAP: (rollout.overlap != "none", "the ranks learn while all of the next samples are drawn"),
        SEGMENT: (rollout.segment_tokens is not None, not_known),
        "algorithm.filter_groups": (cfg.algorithm.filter_groups.is_on, not_known),
        "replay": (cfg.replay is not None, not_known),
        "agent": (cfg.agent is not None, not_known),
        "actor.routing_replay": (cfg.actor.routing_replay != "off", "experts are followed through a step as a whole"),
        "rollout.release": (rollout.release != "none", "models and engines have the memory in turns"),
    }
    for name, model in cfg.built().items():
        key = f"{'reward.model' if name == 'reward' else name}.offload"
        others[key] = model.train.offload != "none", "models and engines have the memory in turns"
    for key, (is_set, why) in others.items():
        if is_set:
            yield Problem((EARLY, key), f"{why}: leave it out")


def _whole_steps(cfg: RLConfig, key: str, why: str) -> Iterator[Problem]:
    """What needs the samples of a step to be drawn together, by the same weights."""
    if cfg.algorithm.filter_groups.is_on:
        yield Problem(("algorithm.filter_groups", key), why)
    if cfg.algorithm.needs_greedy:
        message = f"{cfg.algorithm.adv_estimator} compares with a greedy response of the same weights"
        yield Problem(("algorithm.adv_estimator", key), message)


def _segments(cfg: RLConfig, tokens: int) -> Iterator[Problem]:
    rollout, most = cfg.rollout, cfg.rollout.sampling.max_new_tokens
    if most % tokens:
        message = f"{tokens} does not divide {most}: every segment but the last of a response is as long"
        yield Problem((SEGMENT, "rollout.sampling.max_new_tokens"), message)
    if rollout.oversample == 1:
        message = "required above 1: else a step waits for all of its own groups, and no response goes on in the next"
        yield Problem((OVERSAMPLE, SEGMENT), message)
    if rollout.sampling.stop:
        yield Problem(("rollout.sampling.stop", SEGMENT), "a text could begin in one segment and end in the next")
    yield from _whole_steps(cfg, SEGMENT, "groups that are carried over are not filtered")
    if cfg.agent is not None:
        yield Problem(("agent", SEGMENT), "an agent's turns are drawn whole")
