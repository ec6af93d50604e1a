"""Checks of `trainer: rl`, besides those of every trainer."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config.checks import (
    adapters,
    agent,
    algorithm,
    asynchronous,
    components,
    models,
    placement,
    policy,
    reuse,
    reward,
    rollout,
    routing,
    teacher,
)
from mrl.config.checks.base import Archs, without_effect
from mrl.config.checks.layout import check_shares
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.trainers.rl import RLConfig, samples_per_minibatch, samples_per_step


def check_files(cfg: RLConfig) -> Iterator[Problem]:
    """Checks the key file and the functions that the configuration names."""
    yield from rollout.check_key_file("rollout.api_key_file", cfg.rollout.urls, cfg.rollout.api_key_file)
    yield from teacher.check_files(cfg)
    yield from reward.check_functions(cfg.reward)
    yield from algorithm.check_files(cfg)
    yield from policy.check_file(cfg)
    if cfg.agent is not None:
        yield from agent.check_file(cfg.agent)


def check(cfg: RLConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    yield from adapters.check(cfg)
    yield from _batch(cfg, machine)
    yield from models.check_critic(cfg)
    yield from models.check_heads(cfg, archs)
    yield from algorithm.check_kl(cfg)
    yield from rollout.check(cfg, archs["actor"], machine)
    yield from placement.check(cfg, machine)
    yield from policy.check(cfg)
    yield from asynchronous.check(cfg)
    yield from agent.check(cfg)
    yield from algorithm.check(cfg)
    yield from reward.check(cfg)
    yield from components.check(cfg)
    yield from reuse.check(cfg, machine)
    yield from routing.check(cfg, archs["actor"])
    yield from teacher.check(cfg, archs)


def _batch(cfg: RLConfig, machine: Machine) -> Iterator[Problem]:
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
