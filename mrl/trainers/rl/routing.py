"""Routing replay in numbers: how many experts the trainer would have chosen otherwise, and what replay is worth."""

from __future__ import annotations

from dataclasses import replace

from mrl.algo import rollout_correction
from mrl.trainers.rl.experience import Experience
from mrl.trainers.rl.run import RLRun


def before_updates(run: RLRun, exp: Experience) -> dict[str, float]:
    """mismatch/routing: the share of the engine's choices (a token's expert in a layer) that the trainer's routers
    would not have made by the weights that the step begins with, where a pass before the updates tells.
    mismatch_free/...: as mismatch/..., of a pass without replay, in the steps that `actor.routing_compare_steps` asks
    for. Collective."""
    cfg, replay, rollout = run.cfg, run.actor.replay, exp.rollout
    if replay is None:
        return {}
    changed, every = replay.take_changed_share(), cfg.actor.routing_compare_steps
    metrics = {} if changed is None else {"mismatch/routing": changed}
    if every and rollout.step % every == 0:
        free, _ = run.actor.log_probs(replace(rollout, routed_experts=None), cfg.rollout.sampling.temperature)
        found = rollout_correction.mismatch(free, rollout.rollout_log_probs, exp.is_new)
        metrics |= {f"mismatch_free/{name}": value for name, value in found.items()}
    return metrics


def after_backward(run: RLRun) -> dict[str, float]:
    """routing/changed: of the choices that were given to an update, the share that the policy's routers would not have
    made by then. Collective."""
    changed = run.actor.replay.take_changed_share() if run.actor.replay is not None else None
    return {} if changed is None else {"routing/changed": changed}
