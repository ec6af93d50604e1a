"""Sampling of images with their trajectories, each from its own random stream: equal in every world size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl import platform
from mrl.config.sections.diffusion import SamplerConfig
from mrl.diffusion.conditioning import ConditioningInputs, take_rows
from mrl.diffusion.pipeline import Pipeline
from mrl.diffusion.steps import DenoisingSteps
from mrl.inference.seeds import sample_seed
from mrl.parallel import rank, world_size


class DiffusionError(RuntimeError):
    """Sampling or training cannot continue; the message names the sample."""


@dataclass(frozen=True)
class Trajectories:
    """Samples of this rank, in host memory.

    ids [n]: indices in the step
    latents [n, S + 1, C, H, W] float32, from noise to the end
    log_probs [n, S] float32; 0 at deterministic steps
    conditioning: the net's inputs besides latents and times, on the device
    """

    ids: range
    latents: Tensor
    log_probs: Tensor
    conditioning: ConditioningInputs


def share(total: int, of_rank: int | None = None) -> range:
    """Returns the samples of a rank among `total`; this rank by default."""
    place = rank() if of_rank is None else of_rank
    return range(place * total // world_size(), (place + 1) * total // world_size())


def draw(
    pipeline: Pipeline,
    steps: DenoisingSteps,
    cfg: SamplerConfig,
    ids: range,
    conditioning: ConditioningInputs,
    seeds: tuple[int, int],
    on_images: Callable[[range, Tensor], None],
) -> Trajectories:
    """Samples `ids`, `cfg.batch` at a time. seeds: of the run, and the number of the step.

    on_images: called with the ids and images [n, C, H, W] of each finished batch

    Raises DiffusionError for a non-finite latent, and the errors of `on_images`; the first one is raised after all
    samples, since ranks that share a net must call it equally often.
    """
    count, places = len(ids), len(steps.times)
    problems: list[Exception] = []
    latents = torch.empty(count, places + 1, *pipeline.shape)
    log_probs = torch.zeros(count, places)
    for start in range(0, count, cfg.batch):
        rows = slice(start, min(start + cfg.batch, count))
        mine = ids[rows]
        last = _draw_batch(
            pipeline, steps, cfg, mine, take_rows(conditioning, rows), seeds, latents[rows], log_probs[rows]
        )
        try:
            _require_finite(mine, last)
            on_images(mine, pipeline.decode(last).cpu())
        except Exception as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return Trajectories(ids, latents, log_probs, conditioning)


def _require_finite(ids: range, latents: Tensor) -> None:
    for i, latent in zip(ids, latents, strict=True):
        if not bool(latent.isfinite().all()):
            raise DiffusionError(f"sample {i}: a latent is not finite: the network has probably diverged")


@torch.no_grad()
def _draw_batch(
    pipeline: Pipeline,
    steps: DenoisingSteps,
    cfg: SamplerConfig,
    ids: range,
    conditioning: ConditioningInputs,
    seeds: tuple[int, int],
    latents: Tensor,
    log_probs: Tensor,
) -> Tensor:
    """Fills latents and log_probs; returns the last latents on the device."""
    streams = [torch.Generator().manual_seed(sample_seed(*seeds, i)) for i in ids]

    def noise() -> Tensor:
        drawn = torch.stack([torch.randn(pipeline.shape, generator=stream) for stream in streams])
        return drawn.to(platform.device())

    x, counted = noise(), set(steps.counted)
    latents[:, 0] = x.cpu()
    for place, time in enumerate(steps.times):
        i = torch.full((len(ids),), place, device=x.device)
        said = pipeline.predict(x, time.to(x.device).expand(len(ids)), conditioning, cfg.guidance)
        x, mean = steps.next(said, x, i, noise())
        latents[:, place + 1] = x.cpu()
        if place in counted:
            log_probs[:, place] = steps.log_prob(x, mean, i).cpu()
    return x
