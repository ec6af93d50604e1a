"""The trainers: for each its keys, what is checked between them, and the program that trains.

A new one is a file with its configuration, a file with its loop, and a row here; nothing else asks which trainer it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from mrl.config.checks import rl as rl_checks
from mrl.config.checks.base import Archs
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.trainers import diffusion, dpo, reward_model, sft
from mrl.config.trainers.base import AnyConfig
from mrl.config.trainers.rl import RLConfig

C = TypeVar("C", bound=AnyConfig)


@dataclass(frozen=True)
class Trainer(Generic[C]):
    """What `trainer: NAME` means.

    schema: the keys of such a configuration
    loop: "module:class" of the loop that trains by it, on every rank (see mrl/trainers/shared/loop.py); by name, as
    reading a configuration imports no torch
    check: contradictions between its keys, beside those that every trainer is checked for
    check_files: what is wrong with files that only its keys name
    packages: optional ones that the program imports, by the names of their modules
    plan: "module:class" of what `mrl plan` shows, made of it and a cluster; None: the plan of language models
    preview: "module:function" of it and a number of samples: the lines of `mrl data`; None: those of language models
    """

    schema: type[C]
    loop: str
    check: Callable[[C, Archs, Machine], Iterator[Problem]]
    check_files: Callable[[C], Iterator[Problem]] = lambda cfg: iter(())
    packages: tuple[str, ...] = ()
    plan: str | None = None
    preview: str | None = None

    def load_loop(self) -> Callable[..., Any]:
        """The class, with all that it imports."""
        found: Callable[..., Any] = _load(self.loop)
        return found

    def load_plan(self) -> Callable[[C, Any], OwnPlan] | None:
        """What plans it, with all that it imports."""
        return _load(self.plan) if self.plan is not None else None

    def load_preview(self) -> Callable[[C, int], Iterator[str]] | None:
        """What shows its data, with all that it imports; raises DataError for what cannot be used."""
        return _load(self.preview) if self.preview is not None else None


class OwnPlan(Protocol):
    """Of a trainer that has a plan of its own. problems: why it does not fit, one sentence each."""

    @property
    def problems(self) -> list[str]: ...

    def lines(self) -> Iterator[str]:
        """For a terminal."""

    def data(self) -> dict[str, Any]:
        """The same in plain values, for JSON."""


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


TRAINERS: dict[str, Trainer[Any]] = {  # by `trainer`
    "rl": Trainer(RLConfig, "mrl.trainers.rl.main:RLLoop", rl_checks.check, rl_checks.check_files),
    "sft": Trainer(sft.SFTConfig, "mrl.trainers.sft:SFTLoop", sft.check),
    "dpo": Trainer(dpo.DPOConfig, "mrl.trainers.dpo.loop:DPOLoop", dpo.check),
    "reward_model": Trainer(
        reward_model.RewardModelTrainerConfig,
        "mrl.trainers.reward_model.loop:RewardModelLoop",
        reward_model.check,
        reward_model.check_files,
    ),
    "ddpo": Trainer(
        *(diffusion.DDPOConfig, "mrl.diffusion.ddpo:DDPOLoop", diffusion.check_ddpo, diffusion.check_files),
        packages=diffusion.PACKAGES,
        plan=diffusion.PLAN,
        preview=diffusion.PREVIEW,
    ),
    "diffusion_sft": Trainer(
        *(
            diffusion.DiffusionSFTConfig,
            "mrl.diffusion.sft:DiffusionSFTLoop",
            diffusion.check_sft,
            diffusion.check_files,
        ),
        packages=diffusion.PACKAGES,
        plan=diffusion.PLAN,
        preview=diffusion.PREVIEW,
    ),
}


def trainer_of(cfg: AnyConfig) -> Trainer[Any]:
    return TRAINERS[cfg.trainer]
