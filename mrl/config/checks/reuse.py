"""Checks of weight averages, moving references, replay and demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from mrl.config.checks.base import check_refresh, without_effect
from mrl.config.checks.layout import check_shares
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.sections.reuse import ReplayConfig
from mrl.config.trainers.rl import RLConfig, needs_ref, reused_samples_per_step

OF_A_MODEL = ("parallel", "max_tokens_per_microbatch", "precision", "offload")


def check(cfg: RLConfig, machine: Machine) -> Iterator[Problem]:
    """Yields contradictions and settings without effect."""
    yield from _ema(cfg)
    if needs_ref(cfg):
        yield from _reference(cfg)
    yield from _replay(cfg)
    if cfg.ptx is not None:
        key, count = "ptx.samples_per_update", cfg.ptx.samples_per_update
        yield from check_shares(cfg, machine, key, count, models=["actor"])


def _ema(cfg: RLConfig) -> Iterator[Problem]:
    if cfg.ema is None:
        return
    is_reference = needs_ref(cfg) and cfg.ref.policy == "ema"
    if not (is_reference or cfg.ema.in_validation or cfg.checkpoint.export_hf):
        message = "has no effect: the average is neither validated, nor exported, nor used as the reference"
        yield Problem(("ema", "ema.in_validation", "checkpoint.export_hf", "ref.policy"), message)
    if cfg.data.validation is None:
        yield from without_effect(cfg.ema, "ema", ["in_validation"], "data.validation is not set", "data.validation")


def _reference(cfg: RLConfig) -> Iterator[Problem]:
    ref, key = cfg.ref, "ref.policy"
    if ref.policy == "ema" and cfg.ema is None:
        yield Problem((key, "ema"), "needs a weight average: add an `ema:` section (`ema: {}` for its defaults)")
    if ref.policy != "frozen":
        because = f"the reference is {ref.policy}: it runs in the actor, with other weights"
        yield from without_effect(ref, "ref", ["path", *OF_A_MODEL], because, key)
    elif cfg.ref_is_actor:
        because = "the reference is the actor without its adapters"
        yield from without_effect(ref, "ref", OF_A_MODEL, because, "actor.lora")
    yield from check_refresh(ref, cfg.run.steps)


def _replay(cfg: RLConfig) -> Iterator[Problem]:
    replay, batch = cfg.replay, cfg.batch
    if replay is None:
        return
    key = "replay.prompts_per_step"
    if replay.buffer_prompts < replay.prompts_per_step:
        message = f"{replay.prompts_per_step} exceeds the {replay.buffer_prompts} prompts of the buffer"
        yield Problem((key, "replay.buffer_prompts"), message)
    reused, minibatch = reused_samples_per_step(cfg), batch.samples_per_minibatch
    if minibatch is not None and reused % minibatch:
        product = f"{replay.prompts_per_step} prompts x {batch.samples_per_prompt} samples = {reused}"
        message = f"the {product} replayed samples are not a multiple of the {minibatch} samples of a mini-batch"
        yield Problem((key, "batch.samples_per_minibatch"), message)
    yield from _age(replay, batch.prompts_per_step)
    loss, importance = cfg.algorithm.policy_loss, cfg.algorithm.rollout_correction.rollout_is
    if not loss.uses_ratio and importance is None:
        message = f"{loss.loss_mode} has no ratio to correct for replayed (off-policy) samples: set rollout_is"
        keys = ("replay", "algorithm.policy_loss.loss_mode", "algorithm.rollout_correction.rollout_is")
        yield Problem(keys, message)


def _age(replay: ReplayConfig, new: int) -> Iterator[Problem]:
    """Checks the age of replayed prompts. `new`: prompts per step."""
    if (age := replay.max_age_steps) is None:
        return
    key, kept = "replay.max_age_steps", ceil(replay.buffer_prompts / new)
    if age * new < replay.prompts_per_step:
        message = f"{age} steps of {new} prompts are fewer than the {replay.prompts_per_step} replayed prompts"
        yield Problem((key, "replay.prompts_per_step", "batch.prompts_per_step"), message)
    elif age >= kept:
        message = f"has no effect: the buffer of {replay.buffer_prompts} prompts covers only the last {kept} steps"
        yield Problem((key, "replay.buffer_prompts"), message)
