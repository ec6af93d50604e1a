"""One DDPO update: the chosen steps of images, their losses, the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mrl import platform
from mrl.config.sections.diffusion import DiffusionLossConfig, SamplerConfig
from mrl.diffusion.conditioning import ConditioningInputs, take_rows
from mrl.diffusion.learner import DiffusionLearner
from mrl.diffusion.loss import clipped, kl_to_reference
from mrl.diffusion.pipeline import Pipeline
from mrl.diffusion.sample import Trajectories, share
from mrl.diffusion.steps import STEPS, DenoisingSteps
from mrl.parallel import world_size

METRICS = ("approx_kl", "clipfrac", "kl_to_reference")
Predict = Callable[[Tensor, Tensor, ConditioningInputs, float], Tensor]  # `Pipeline.predict`


@dataclass(frozen=True)
class Policy:
    """Policy of denoising steps. reference: output of the initial net; None: no KL term."""

    pipeline: Pipeline
    steps: DenoisingSteps
    sampler: SamplerConfig
    loss: DiffusionLossConfig
    micro_batch: int
    reference: Predict | None = None

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        sampler: SamplerConfig,
        loss: DiffusionLossConfig,
        micro_batch: int,
        reference: Predict | None = None,
    ) -> Policy:
        """Returns a policy with the steps of `sampler`."""
        level = sampler.eta if sampler.kind == "ddim" else sampler.noise_level
        steps = STEPS[sampler.kind](pipeline.scheduler, sampler.steps, level, **pipeline.timing_of(sampler.steps))
        return cls(pipeline, steps, sampler, loss, micro_batch, reference)

    def log_probs(self, data: Trajectories, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probs [n] float32 with gradient, and KL divergences [n] from the reference, 0 without one.

        rows [n, 2]: (index among the rank's samples, step)
        """
        device = platform.device()
        sample, place = rows[:, 0], rows[:, 1].to(device)
        x, after = (data.latents[sample, rows[:, 1] + later].to(device) for later in (0, 1))
        given = x, self.steps.times.to(device)[place], take_rows(data.conditioning, sample), self.sampler.guidance
        theirs = None
        if self.reference is not None:
            with torch.no_grad():
                theirs = self.steps.mean(self.reference(*given), x, place)
        mean = self.steps.mean(self.pipeline.predict(*given), x, place)
        kl = torch.zeros(len(rows), device=device)
        if theirs is not None:
            kl = kl_to_reference(mean, theirs, self.steps.stds.to(device)[place])
        return self.steps.log_prob(after, mean, place), kl


def chosen_steps(counted: Sequence[int], fraction: float, seeds: Sequence[int]) -> list[int]:
    """Returns the steps of one image for an update: the first `fraction` (at least 1) in an image's own random
    order."""
    order = np.random.default_rng(list(seeds)).permutation(counted)
    return [int(place) for place in order[: max(1, math.floor(len(counted) * fraction))]]


def make_update(
    policy: Policy, learner: DiffusionLearner, data: Trajectories, advantages: Tensor, places: dict[int, list[int]]
) -> dict[str, float]:
    """Makes one update from the images in `places` (id in the step -> its steps) on all ranks. Collective.

    advantages [B] float32: of the whole step. Returns loss, grad_norm, lr, skipped and the means of METRICS over rows.
    """
    mine = [(i - data.ids.start, place) for i, chosen in places.items() if i in data.ids for place in chosen]
    rows, weights = torch.tensor(mine, dtype=torch.int64).view(-1, 2), torch.ones(len(mine))
    if learner.is_sharded:
        rows, weights = _filled_up(rows, _passes(policy, places, len(advantages)), policy)
    total = sum(map(len, places.values()))
    sums = torch.zeros(3, device=platform.device(), dtype=torch.float64)
    loss = learner.accumulate(_losses(policy, data, advantages, rows, weights, total, sums))
    (_, *means), metrics = learner.step([loss, *sums])
    return metrics | {name: value / total for name, value in zip(METRICS, means, strict=True)}


def _passes(policy: Policy, places: dict[int, list[int]], count: int) -> int:
    """Passes of the rank with most rows, since all ranks must call a sharded net equally often. count: images of the
    step."""
    owned = (share(count, each) for each in range(world_size()))
    return max(-(-sum(len(places.get(i, ())) for i in ids) // policy.micro_batch) for ids in owned)


def _filled_up(rows: Tensor, passes: int, policy: Policy) -> tuple[Tensor, Tensor]:
    """Pads with rows of weight 0, one for each missing pass."""
    missing = passes - -(-len(rows) // policy.micro_batch)
    if missing <= 0:
        return rows, torch.ones(len(rows))
    rest = -len(rows) % policy.micro_batch  # fills up the last existing pass
    extra = rest + (missing - 1) * policy.micro_batch + 1
    idle = torch.tensor([[0, policy.steps.counted[0]]]).expand(extra, 2)
    return torch.cat([rows, idle]), torch.cat([torch.ones(len(rows)), torch.zeros(extra)])


def _losses(
    policy: Policy, data: Trajectories, advantages: Tensor, rows: Tensor, counts: Tensor, total: int, sums: Tensor
) -> Iterator[Tensor]:
    """Yields each micro-batch's share of the update's loss; adds the metrics to `sums`."""
    device, ids = platform.device(), torch.arange(data.ids.start, data.ids.stop)
    for start in range(0, len(rows), policy.micro_batch):  # a rank may have none of an update's images
        part, weights = (each[start : start + policy.micro_batch] for each in (rows, counts))
        log_probs, kl = policy.log_probs(data, part)
        old = data.log_probs[part[:, 0], part[:, 1]].to(device)
        losses, metrics = clipped(log_probs, old, advantages[ids[part[:, 0]]].to(device), policy.loss.clip_range)
        counted = weights.to(device)
        each = torch.stack([metrics["approx_kl"], metrics["clipfrac"], kl.detach()])
        sums += (each * counted).sum(1).double()
        yield ((losses + policy.loss.kl_coef * kl) * counted).sum() / total
