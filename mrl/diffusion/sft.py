"""Denoising of given images: the net predicts the noise, the image or the velocity at a random time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from mrl.config.checks.diffusion import pixels_a_latent
from mrl.config.sections.diffusion import SamplerConfig
from mrl.config.trainers.diffusion import DiffusionSFTConfig
from mrl.core import StepStats
from mrl.diffusion.conditioning import ConditioningInputs, take_rows, where
from mrl.diffusion.prompts import PromptRows
from mrl.diffusion.rewards import SamplingErrorCheck
from mrl.diffusion.run import DiffusionRun, begin
from mrl.diffusion.sample import share
from mrl.inference.seeds import sample_seed
from mrl.trainers.shared.loop import Loop
from mrl.trainers.shared.run import set_up_run
from mrl.trainers.shared.updates import named

ERROR_CHECK = SamplingErrorCheck()


@dataclass(frozen=True)
class DiffusionBatch:
    """Training batch. latents, noise [n, C, H, W]; places [n]: indices of their scheduler times; told: conditioning"""

    latents: Tensor
    noise: Tensor
    places: Tensor
    conditioning: ConditioningInputs


@dataclass
class DiffusionSFTRun(DiffusionRun):
    cfg: DiffusionSFTConfig
    data: PromptRows


class DiffusionSFTLoop(Loop[DiffusionSFTRun]):
    def open(self) -> contextlib.AbstractContextManager[DiffusionSFTRun]:
        return open_run(self.cfg)

    def step(self, step: int) -> StepStats:
        return train_step(self.run, step)


@contextlib.contextmanager
def open_run(cfg: DiffusionSFTConfig) -> Iterator[DiffusionSFTRun]:
    """Builds the run on every rank; closes files and process group on any exit."""
    with set_up_run(cfg) as start:
        data = ERROR_CHECK.together("reading data.train", lambda: PromptRows(cfg.data, cfg.run.seed))
        run = begin(start, cfg, SamplerConfig(), {})
        start.is_set_up()
        yield DiffusionSFTRun(**vars(run), data=data)


def train_step(run: DiffusionSFTRun, step: int) -> StepStats:
    """Makes one update."""
    cfg = run.cfg
    stats, total = run.checkpointer.new_stats(step + 1), cfg.batch.images_per_step
    ids = share(total)
    with run.phase("update", stats):
        batch = ERROR_CHECK.together(
            f"reading the images of step {step + 1}", lambda: _batch(cfg, run, run.data, step, ids)
        )
        passes = (slice(first, first + cfg.actor.micro_batch) for first in range(0, len(ids), cfg.actor.micro_batch))
        losses = (_loss(run, batch, rows) / total for rows in passes)
        _, metrics = run.learner.step([run.learner.accumulate(losses)])
        run.updates.note_update("actor", metrics, step, range(total))
        run.updates.end_of_step(step + 1)
    stats.metrics |= named("actor", metrics)
    run.phase.end_of_step(stats)
    run.recorder.log(stats)
    return stats


def _batch(cfg: DiffusionSFTConfig, run: DiffusionRun, data: PromptRows, step: int, ids: range) -> DiffusionBatch:
    """Batch of this rank's images, each from its own random stream."""
    pipeline = run.pipeline
    rows = data.of_step(step, cfg.batch.images_per_step)[ids.start : ids.stop]
    scale = pixels_a_latent(pipeline.vae.config if pipeline.vae is not None else None)
    channels = pipeline.shape[0] if pipeline.vae is None else pipeline.vae.config.in_channels
    size = (pipeline.shape[1] * scale, pipeline.shape[2] * scale)
    latents = pipeline.encode(torch.stack([data.image(source, row, channels, size) for source, row in rows]))
    noises, places, dropped = [], [], []
    for i in ids:
        stream = torch.Generator().manual_seed(sample_seed(cfg.run.seed, step, i))
        noises.append(torch.randn(pipeline.shape, generator=stream))
        places.append(int(torch.randint(pipeline.scheduler.config.num_train_timesteps, (), generator=stream)))
        dropped.append(float(torch.rand((), generator=stream)) < cfg.batch.drop_prompt)
    device, encoders = platform.device(), pipeline.conditioning
    conditioning = encoders.encode([row for _, row in rows])
    conditioning = where(torch.tensor(dropped, device=device), encoders.blank(len(rows)), conditioning)
    return DiffusionBatch(latents, torch.stack(noises).to(device), torch.tensor(places, device=device), conditioning)


def _loss(run: DiffusionRun, batch: DiffusionBatch, rows: slice) -> Tensor:
    """Sum over images of the mean squared error over a latent's elements."""
    latents, noise, places = batch.latents[rows], batch.noise[rows], batch.places[rows]
    noisy, times, target = noised(run.pipeline.scheduler, latents, noise, places)
    said = run.pipeline.predict(noisy, times, take_rows(batch.conditioning, rows), guidance=1.0)
    return ((said - target) ** 2).flatten(1).mean(1).sum()


def noised(scheduler: Any, latents: Tensor, noise: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (noisy latents, net times, targets)."""
    count = scheduler.config.num_train_timesteps
    if not hasattr(scheduler, "alphas_cumprod"):  # a rectified flow
        sigma = ((places + 1).float() / count).view(-1, 1, 1, 1)
        return (1 - sigma) * latents + sigma * noise, sigma.flatten() * count, noise - latents
    alpha = scheduler.alphas_cumprod.to(latents.device)[places].view(-1, 1, 1, 1)
    noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * noise
    velocity = alpha.sqrt() * noise - (1 - alpha).sqrt() * latents
    targets = {"epsilon": noise, "v_prediction": velocity, "sample": latents}
    return noisy, places, targets[scheduler.config.prediction_type]
