"""Routing replay: has the model experts, can the engine say which it took, and is anything replayed at all?"""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import without_effect
from mrl.config.engines import ENGINES
from mrl.config.problems import Problem
from mrl.config.trainers.rl import RLConfig, most_updates_per_step, needs_forward_pass
from mrl.families import ModelArch

KEY = "actor.routing_replay"


def check(cfg: RLConfig, arch: ModelArch | None) -> Iterator[Problem]:
    """arch: the actor's; None where it could not be read."""
    mode = cfg.actor.routing_replay
    if mode != "engine":
        because = "only the engine's experts make log-probs differ from those without replay"
        yield from without_effect(cfg.actor, "actor", ["routing_compare_steps"], because, KEY)
    if mode != "off" and arch is not None and arch.experts is None:
        yield Problem((KEY, "model.path"), f"{mode}: the model has no experts to choose from, leave it out")
    elif mode == "engine":
        yield from _engine(cfg)
    elif mode == "trainer":
        yield from _trainer(cfg)


def _trainer(cfg: RLConfig) -> Iterator[Problem]:
    if most_updates_per_step(cfg) == 1:
        message = "trainer has no effect: the step's only update is of the weights that chose the experts"
        yield Problem((KEY, "batch.samples_per_minibatch", "batch.epochs_per_step"), message)
    elif not needs_forward_pass(cfg.algorithm, single_update=False):
        message = (
            "trainer notes experts in the pass that computes old log-probs, and there is none with old_log_probs: "
            "engine: take trainer's there, or engine here"
        )
        yield Problem((KEY, "algorithm.old_log_probs"), message)


def _engine(cfg: RLConfig) -> Iterator[Problem]:
    rollout = cfg.rollout
    if not ENGINES[rollout.engine].returns_experts:
        named = " or ".join(name for name, kind in ENGINES.items() if kind.returns_experts)
        message = f"{rollout.engine} cannot say which experts it took: {named}, or routing_replay: trainer"
        yield Problem((KEY, "rollout.engine"), message)
    if rollout.overlap == "bounded":
        message = (
            "after a push the engine reads responses that go on again, by the new weights, and says the experts of "
            "that, not those by which their tokens were drawn: one_step, segment_tokens, or routing_replay: trainer"
        )
        yield Problem((KEY, "rollout.overlap"), message)
