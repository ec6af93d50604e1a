"""Rules that hold between keys. Pure functions: everything is known before a process is started."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.config import (
    layout_checks,
    policy_checks,
    resilience_checks,
    resume_checks,
    reuse_checks,
    reward_checks,
    rl_checks,
    sampling_checks,
)
from mrl.config.derived import Machine
from mrl.config.file_checks import check_files, read_archs
from mrl.config.layout_checks import Archs
from mrl.config.problems import Problem
from mrl.config.rl_checks import inert
from mrl.config.schema import OptimizerConfig, RLConfig, SFTConfig


def check_all(cfg: RLConfig | SFTConfig, machine: Machine) -> list[Problem]:
    """`check`, after the files that the configuration names have been looked at."""
    problems = list(check_files(cfg))
    archs = read_archs(cfg, problems)
    return problems + check(cfg, archs, machine)


def check(cfg: RLConfig | SFTConfig, archs: Archs, machine: Machine) -> list[Problem]:
    """Contradictions, impossible layouts and settings without effect; each names every key that it takes part in."""
    problems = list(layout_checks.check(cfg, archs, machine))
    problems += _common(cfg)
    problems += resilience_checks.check(cfg)
    if isinstance(cfg, SFTConfig):
        return problems + list(_sft(cfg, archs, machine))
    problems += rl_checks.check(cfg, archs, machine)
    problems += policy_checks.check(cfg)
    problems += sampling_checks.check(cfg)
    problems += reward_checks.check(cfg)
    problems += reuse_checks.check(cfg, archs, machine)
    return problems


def _common(cfg: RLConfig | SFTConfig) -> Iterator[Problem]:
    if cfg.run.name in ("", ".", "..") or "/" in cfg.run.name:
        yield Problem(("run.name",), f"{cfg.run.name!r} must be one plain directory name (run.root holds the path)")
    paths = (cfg.critic.path if cfg.critic is not None else None, cfg.ref.path) if isinstance(cfg, RLConfig) else ()
    if cfg.model.from_scratch and cfg.model.allow_pickle and not any(paths):
        yield Problem(("model.allow_pickle", "model.from_scratch"), "has no effect: from_scratch reads no weights")
    yield from _checkpoint(cfg)
    yield from _optimizer("actor.optimizer", cfg.actor.optimizer)
    if isinstance(cfg, RLConfig) and cfg.critic is not None:
        yield from _optimizer("critic.optimizer", cfg.critic.optimizer)


def _checkpoint(cfg: RLConfig | SFTConfig) -> Iterator[Problem]:
    checkpoint, every = cfg.checkpoint, "checkpoint.every_steps"
    kept = checkpoint.keep_every_steps
    if checkpoint.every_steps is None:
        names = ["keep_last", "keep_every_steps", "asynchronous", "writers"]
        names += ["on_error"] if checkpoint.weights_every_steps is None else []
        yield from inert(checkpoint, "checkpoint", names, "no checkpoints are written", every)
    elif kept is not None and kept % checkpoint.every_steps:
        message = f"{kept} is no multiple of {checkpoint.every_steps}, so no checkpoint is written at every such step"
        yield Problem(("checkpoint.keep_every_steps", every), message)
    for key in checkpoint.accept_changes:
        if not resume_checks.is_key(type(cfg), key):
            yield Problem(("checkpoint.accept_changes",), f"{key!r} is no key of this configuration")


def _optimizer(key: str, opt: OptimizerConfig) -> Iterator[Problem]:
    decay = f"{key}.decay"
    if opt.decay == "constant":
        yield from inert(opt, key, ["decay_steps", "min_lr"], "the learning rate is constant", decay)
    elif opt.decay_steps is None:
        yield Problem((f"{key}.decay_steps", decay), f"required by {opt.decay} decay")
    elif opt.warmup_steps >= opt.decay_steps:
        message = f"{opt.warmup_steps} warm-up updates leave none of the {opt.decay_steps} for the decay"
        yield Problem((f"{key}.warmup_steps", f"{key}.decay_steps"), message)
    if opt.min_lr > opt.lr:
        yield Problem((f"{key}.min_lr", f"{key}.lr"), f"{opt.min_lr} is above the learning rate {opt.lr}")
    for name, beta in (("beta1", opt.beta1), ("beta2", opt.beta2)):
        if beta == 1:
            yield Problem((f"{key}.{name}",), "must be below 1")


def _sft(cfg: SFTConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    for key, dp in layout_checks.dp_sizes(cfg, machine).items():
        if cfg.batch.samples_per_step < dp:
            message = (
                f"{cfg.batch.samples_per_step} samples are fewer than the {dp} data-parallel replicas that share them"
            )
            yield Problem(("batch.samples_per_step", key), message)
    if archs.actor is not None and cfg.data.max_prompt_tokens >= archs.actor.max_positions:
        message = f"leaves no room for answers in the model's {archs.actor.max_positions} positions"
        yield Problem(("data.max_prompt_tokens", "model.path"), message)
