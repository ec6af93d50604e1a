"""Checks of routing replay: the model has experts, the engine returns its routing, and replay has an effect."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import without_effect
from mrl.config.engines import ENGINES
from mrl.config.problems import Problem
from mrl.config.trainers.rl import RLConfig, most_updates_per_step, needs_forward_pass
from mrl.families import ModelArch

KEY = "actor.routing_replay"


def check(cfg: RLConfig, arch: ModelArch | None) -> Iterator[Problem]:
    """Checks routing replay. `arch`: shape of the actor; None if unreadable."""
    mode = cfg.actor.routing_replay
    if mode != "engine":
        because = "only replay of the engine's routing changes log-probs"
        yield from without_effect(cfg.actor, "actor", ["routing_compare_steps"], because, KEY)
    if mode != "off" and arch is not None and arch.experts is None:
        yield Problem((KEY, "model.path"), f"{mode} needs a model with experts, and this one is dense: leave it out")
    elif mode == "engine" and not ENGINES[cfg.rollout.engine].returns_experts:
        named = " or ".join(name for name, kind in ENGINES.items() if kind.returns_experts)
        message = f"{cfg.rollout.engine} does not return routed experts: use {named}, or routing_replay: trainer"
        yield Problem((KEY, "rollout.engine"), message)
    elif mode == "trainer" and most_updates_per_step(cfg) == 1:
        message = "trainer has no effect: the only update of a step uses the same weights as the forward pass"
        yield Problem((KEY, "batch.samples_per_minibatch", "batch.epochs_per_step"), message)
    elif mode == "trainer" and not needs_forward_pass(cfg.algorithm, single_update=False):
        what = "trainer records routing in the forward pass for old log-probs, which old_log_probs: engine skips"
        message = f"{what}: set old_log_probs: trainer, or routing_replay: engine"
        yield Problem((KEY, "algorithm.old_log_probs"), message)
