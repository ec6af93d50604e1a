"""Grids of images during a run: RUN_DIR/images/step_N.png after N steps, from the same noise and prompts."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from torch import Tensor

from mrl.config.trainers.diffusion import DDPOConfig
from mrl.diffusion.prompts import PromptRows
from mrl.diffusion.rewards import SamplingErrorCheck
from mrl.diffusion.sample import draw
from mrl.diffusion.update import Policy
from mrl.files import write_atomically
from mrl.parallel import rank, world_size

ERROR_CHECK = SamplingErrorCheck()
NO_STEP = 1 << 40  # no real step number; seeds the random streams of the grids
SMALLEST = 64  # pixels; smaller images are enlarged by a whole number


class ImageGrids:
    """Image grids of one run, for the first prompts of the data, in turn."""

    def __init__(self, cfg: DDPOConfig, data: PromptRows) -> None:
        self._cfg, self.prompts = cfg, data.first(cfg.images.count)

    def is_due(self, steps: int) -> bool:
        """True before the first step, after the last, and every `every_steps` steps."""
        return steps % self._cfg.images.every_steps == 0 or steps == self._cfg.run.steps

    def draw(self, policy: Policy, steps: int) -> Tensor:
        """Returns images [count, C, H, W] after `steps` steps, equal for any number of ranks. Collective.

        Each rank draws equally many images.
        """
        count, what = self._cfg.images.count, f"generating the images after step {steps}"
        each = -(-count // world_size())
        ids = range(rank() * each, (rank() + 1) * each)
        prompts, pipeline = [self.prompts[i % count] for i in ids], policy.pipeline
        conditioning = ERROR_CHECK.together(what, lambda: pipeline.conditioning.encode(prompts))

        def mine() -> Tensor:
            found: list[Tensor] = []
            seeds = (self._cfg.run.seed, NO_STEP)
            draw(
                pipeline, policy.steps, policy.sampler, ids, conditioning, seeds, lambda _, images: found.append(images)
            )
            return torch.cat(found)

        return torch.cat(ERROR_CHECK.each(what, mine))[:count]


def grid(images: Tensor) -> bytes:
    """Returns a PNG of images [n, 1 or 3, H, W] in 0..1, in rows from left to right, as square as n allows."""
    from PIL import Image

    columns = int(len(images) ** 0.5 + 0.999)
    rows = -(-len(images) // columns)
    scale = max(1, SMALLEST // images.shape[-1])
    levels = (images * 255).round().byte().repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    _, channels, height, width = levels.shape
    sheet = torch.full((channels, rows * (height + 2), columns * (width + 2)), 255, dtype=torch.uint8)
    for i, image in enumerate(levels):
        top, left = i // columns * (height + 2), i % columns * (width + 2)
        sheet[:, top : top + height, left : left + width] = image
    array = sheet[0].numpy() if channels == 1 else sheet.permute(1, 2, 0).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return buffer.getvalue()


def save_grid(run_dir: Path, step: int, images: Tensor) -> None:
    """Writes RUN_DIR/images/step_N.png; raises OSError."""
    (run_dir / "images").mkdir(exist_ok=True)
    write_atomically(run_dir / "images" / f"step_{step}.png", grid(images))
