"""Builds a model of a run from its configuration."""

from __future__ import annotations

import torch

from mrl.config.schema import Config, TrainConfig
from mrl.families import ModelArch, load_arch
from mrl.families.table import Role
from mrl.learner import Learner
from mrl.learner.learner import PixelsOf
from mrl.trainers.shared.world import World


def build_learner(
    cfg: Config,
    world: World,
    role: Role,
    path: str | None,
    train: TrainConfig,
    *,
    trainable: bool = True,
    arch: ModelArch | None = None,
    replays: bool = False,
    pixels: PixelsOf | None = None,
    base: Learner | None = None,
) -> Learner:
    """Builds one model of the run. Collective.

    path: model with weights; None: the run's model, which may start at random. arch: None: the architecture of the
    path.
    pixels: pixels of the pictures in the prompts. base: as in Learner.
    """
    where = path or cfg.model.path
    made = Learner(
        role,
        arch or load_arch(where),
        where,
        train,
        world.meshes.get(train.parallel),
        dtype=getattr(torch, cfg.model.dtype),
        seed=cfg.run.seed,
        from_scratch=cfg.model.from_scratch and path is None,
        allow_pickle=cfg.model.allow_pickle,
        trainable=trainable,
        trains_vision=cfg.model.vision.train,
        replays=replays,
        base=base,
    )
    made.pixels = pixels
    return made
