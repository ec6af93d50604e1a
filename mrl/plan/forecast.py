"""Planned seconds of a step with given samples, under the phase names of the metrics."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from mrl.plan import timing
from mrl.plan.plan import Plan
from mrl.plan.timing import ClusterRates
from mrl.plan.workload import SampleLengths

PHASES = {"scoring": "rollout", "actor_update": "update", "critic_update": "update", "moving memory": "offload"}


@dataclass(frozen=True)
class Samples:
    """Samples that a step has trained on.

    prompt, response: mean tokens; longest_prompt, longest_response: tokens
    """

    count: int
    prompt: float
    response: float
    longest_prompt: int
    longest_response: int


def forecast(plan: Plan, samples: Samples, phases: Collection[str], updated: Collection[str]) -> dict[str, float]:
    """Returns seconds by phase, for the given `phases` of the step and "offload", which is part of all of them.

    The engines are assumed to have generated the configured number of samples, with the lengths of these.
    updated: names of the models that were updated
    """
    planned = plan.work.size
    whole = planned.minibatch == planned.learnt
    size = replace(
        planned,
        learnt=samples.count,
        minibatch=samples.count if whole else planned.minibatch,
        prompt_tokens=samples.longest_prompt,
        response_tokens=samples.longest_response,
    )
    longest = samples.longest_prompt + samples.longest_response
    images = min(samples.prompt, planned.image_tokens)
    work = plan.work.with_samples(size, SampleLengths(longest, samples.response, samples.prompt, images))
    away = {f"{name}_update" for name, model in work.models.items() if model.is_trained and name not in updated}
    found: dict[str, float] = {}
    for part in timing.step(ClusterRates(plan.cluster, plan.assumed), {"": work}, plan.engine):
        phase = PHASES.get(part.phase, part.phase)
        if part.phase not in away and phase in (*phases, "offload"):
            found[phase] = found.get(phase, 0.0) + part.seconds
    return found
