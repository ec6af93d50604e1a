"""Forward passes over a step's samples before its first update, over the first ones while others are still generated.

A step is cut into parts, in the order of its samples. Each is computed by itself, as soon as it is whole or after all
have been drawn: nothing depends on who was faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mrl.config.schema import RLConfig
from mrl.config.trainers.rl import samples_per_step, updates_per_step
from mrl.core import Rollout, Sample
from mrl.data import collate
from mrl.trainers.rl.experience import Passes, forward_passes
from mrl.trainers.rl.models import Models

Compute = Callable[[Rollout], Passes]


@dataclass(frozen=True)
class ToCompute:
    """The next part of a step, for every rank."""

    part: Rollout


class StepPasses:
    """compute: of some samples; collective. ask: rank 0's, has a part computed by every rank while samples are drawn.

    `early` parts of the step were computed before all samples were there, which took `early_s` seconds.
    """

    def __init__(self, compute: Compute, ask: Callable[[ToCompute], object], samples: int, parts: int) -> None:
        self._compute, self._ask = compute, ask
        self._parts = [range(samples * i // parts, samples * (i + 1) // parts) for i in range(parts)]
        self._drawn: dict[int, Sample] = {}
        self._made: list[Passes] = []
        self.early_s, self.early = 0.0, 0

    @staticmethod
    def make(cfg: RLConfig, models: Models, ask: Callable[[ToCompute], object]) -> StepPasses:
        single, temperature = updates_per_step(cfg) == 1 and cfg.replay is None, cfg.rollout.sampling.temperature
        notes = cfg.actor.routing_replay == "trainer"

        def compute(rollout: Rollout) -> Passes:
            used = models.actor, models.critic, models.ref
            return forward_passes(cfg.algorithm, rollout, temperature, *used, single_update=single, notes_experts=notes)

        return StepPasses(compute, ask, samples_per_step(cfg), cfg.rollout.early_passes or 1)

    def begin(self) -> None:
        """A step; on every rank."""
        self._drawn, self._made, self.early_s, self.early = {}, [], 0.0, 0

    def seeing(self, step: int, tick: Callable[[Sample], None]) -> Callable[[Sample], None]:
        """Returns the function that rank 0 calls with each of the step's samples; it also calls `tick`."""

        def see(sample: Sample) -> None:
            tick(sample)
            self._see(step, sample)

        return see

    def _see(self, step: int, sample: Sample) -> None:
        last = len(self._parts) - 1  # waits for all
        if self.early == last:
            return
        self._drawn[sample.request.sample_id] = sample
        while self.early < last and all(place in self._drawn for place in self._parts[self.early]):
            members = [self._drawn.pop(place) for place in self._parts[self.early]]
            own = [
                replace(sample, request=replace(sample.request, sample_id=place))
                for place, sample in enumerate(members)
            ]
            self._ask(ToCompute(collate(step, own)))

    def add(self, part: Rollout) -> None:
        """The next part of the step. Collective."""
        began = time.monotonic()
        self._made.append(self._compute(part))
        self.early, self.early_s = self.early + 1, self.early_s + time.monotonic() - began

    def early_metrics(self, seconds: dict[str, float]) -> dict[str, float]:
        """Returns how many parts of the step did not wait, and moves their seconds to the phase `experience`."""
        if len(self._parts) == 1:
            return {}
        seconds["rollout"] -= self.early_s
        seconds["experience"] = self.early_s
        return {"rollout/early_parts": float(self.early)}

    def of(self, rollout: Rollout) -> Passes:
        """Returns the passes of the whole step; computes the missing parts now. Collective.

        If samples were left out of the step, the early parts have other samples than the rollout and are not used.
        """
        if len(self._parts) == 1 or rollout.num_samples != self._parts[-1].stop:
            return self._compute(rollout)
        late = [self._compute(rollout.part(samples)) for samples in self._parts[len(self._made) :]]
        columns = zip(*(vars(each).values() for each in [*self._made, *late]), strict=True)
        return Passes(*(None if parts[0] is None else torch.cat(parts) for parts in columns))
