"""Checks of the samples of a step of `trainer: rl`, and of their division into updates and over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks.base import without_effect
from mrl.config.checks.layout import check_shares
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.trainers.rl import RLConfig, samples_per_minibatch, samples_per_step


def check(cfg: RLConfig, machine: Machine) -> Iterator[Problem]:
    total, minibatch = samples_per_step(cfg), samples_per_minibatch(cfg)
    product = f"{cfg.batch.prompts_per_step} prompts x {cfg.batch.samples_per_prompt} samples = {total}"
    if total % minibatch:
        yield Problem(
            ("batch.samples_per_minibatch", "batch.prompts_per_step", "batch.samples_per_prompt"),
            f"{minibatch} does not divide the {product} samples of a step",
        )
    if minibatch == total and cfg.replay is None:
        because = "each update uses all samples of its step"
        yield from without_effect(cfg.batch, "batch", ["shuffle_minibatches"], because, "batch.samples_per_minibatch")
    explicit = cfg.batch.samples_per_minibatch is not None
    key = "batch.samples_per_minibatch" if explicit else "batch.prompts_per_step"
    yield from check_shares(cfg, machine, key, minibatch, "samples per update")
