"""Checks of section `adapters`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel

from mrl.config.checks.base import changed
from mrl.config.problems import Problem
from mrl.config.trainers.rl import RLConfig

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
METRICS = {"checkpoint", "engines", "memory", "perf", "plan", "response", "reward", "rollout", "sync", "time"}  # shared


def check(cfg: RLConfig) -> Iterator[Problem]:
    """Checks names, and that all that adapters share is what several of them can share."""
    if not cfg.adapters:
        return
    for name in cfg.adapters:
        if not NAME.fullmatch(name):
            message = (
                "names a folder and metrics: use at most 63 of a-z, 0-9, _ and -, and begin with a letter or digit"
            )
            yield Problem((f"adapters.{name}",), message)
        if name in METRICS:
            yield Problem((f"adapters.{name}",), f"metrics of the whole run are named {name}/...: choose another name")
    if cfg.sync.lora != "adapter":
        message = "several adapters of one base are synced unmerged: set sync.lora: adapter"
        yield Problem(("adapters", "sync.lora"), message)
    if cfg.actor.offload != "none":
        message = "several adapters share the model's memory: set actor.offload: none"
        yield Problem(("adapters", "actor.offload"), message)
    if cfg.rollout.is_behind:
        message = "all adapters are synced at once, with nothing in flight: set rollout.max_staleness: 0 and "
        message += "rollout.interrupt: never, and leave out rollout.segment_tokens"
        yield Problem(("adapters", "rollout.max_staleness"), message)
    yield from _unused(cfg)
    alone = {
        "critic": cfg.critic is not None,
        "ema": cfg.ema is not None,
        "teacher": cfg.teacher is not None,
        "replay": cfg.replay is not None,
        "ptx": cfg.ptx is not None,
        "ref.path": cfg.ref.path is not None,
        "ref.policy": cfg.ref.policy != "frozen",
        "rollout.early_passes": cfg.rollout.early_passes is not None,
        "placement.mode": cfg.placement.is_apart,
        "checkpoint.push_to_hub": cfg.checkpoint.push_to_hub is not None,
    }
    for key in (key for key, is_set in alone.items() if is_set):
        yield Problem((key, "adapters"), "is not supported with several adapters: remove the key, or train one adapter")
    for name, own in cfg.adapter_configs().items():
        if own.reward.model is not None:
            key = "reward" if cfg.adapters[name].reward is None else f"adapters.{name}.reward"
            message = "is not supported with several adapters: score by a server, see reward.servers"
            yield Problem((f"{key}.model", "adapters"), message)


def _unused(cfg: RLConfig) -> Iterator[Problem]:
    """Checks for sections of the run that every adapter replaces. Those that a run must have are left out."""
    sections: dict[str, tuple[BaseModel, str, str]] = {
        "validation": (cfg, "", "validation"),
        "agent": (cfg, "", "agent"),
        "sampling": (cfg.rollout, "rollout", "sampling"),
        "optimizer": (cfg.actor, "actor", "optimizer"),
    }
    for own, (section, key, name) in sections.items():
        if all(dict(adapter)[own] is not None for adapter in cfg.adapters.values()):
            for _ in changed(section, name):
                message = f"has no effect: each of the adapters has its own {own}"
                yield Problem((f"{key}.{name}".removeprefix("."), "adapters"), message)
