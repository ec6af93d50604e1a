"""Table of the trainers: the keys, the checks and the main program of each.

A new trainer needs a file with its configuration, a file with its loop, and a row here. No other code depends on which
trainer runs.
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
    """The meaning of `trainer: NAME`.

    Attributes:
        schema: configuration class
        loop: "module:class" of the loop that trains on every rank (mrl/trainers/shared/loop.py). A name, because
            reading a configuration must not import torch
        check: checks between keys, besides those of every trainer
        check_files: checks of files that only this trainer's keys name
        packages: optional packages that the program imports, by module name
        plan: "module:class" of `mrl plan`'s output, constructed with the configuration and a cluster; None: the plan of
            language models
        preview: "module:function" that takes the configuration and a number of samples, and yields the lines of `mrl
            data`; None: the preview of language models
    """

    schema: type[C]
    loop: str
    check: Callable[[C, Archs, Machine], Iterator[Problem]]
    check_files: Callable[[C], Iterator[Problem]] = lambda cfg: iter(())
    packages: tuple[str, ...] = ()
    plan: str | None = None
    preview: str | None = None

    def load_loop(self) -> Callable[..., Any]:
        """Imports and returns the class of the loop."""
        found: Callable[..., Any] = _load(self.loop)
        return found

    def load_plan(self) -> Callable[[C, Any], OwnPlan] | None:
        """Imports and returns the class of this trainer's own plan, if it has one."""
        return _load(self.plan) if self.plan is not None else None

    def load_preview(self) -> Callable[[C, int], Iterator[str]] | None:
        """Imports and returns this trainer's own preview, if it has one. It raises DataError for unusable data."""
        return _load(self.preview) if self.preview is not None else None


class OwnPlan(Protocol):
    """Plan of a trainer that does not use the plan of language models.

    Attributes:
        problems: reasons why the run does not fit, one sentence each
    """

    @property
    def problems(self) -> list[str]: ...

    def lines(self) -> Iterator[str]:
        """Yields the plan's lines for a terminal."""

    def data(self) -> dict[str, Any]:
        """Returns the plan as plain values, for JSON."""


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
    "ddpo": Trainer(diffusion.DDPOConfig, "mrl.diffusion.ddpo:DDPOLoop", diffusion.check_ddpo, **diffusion.OF_BOTH),
    "diffusion_sft": Trainer(
        diffusion.DiffusionSFTConfig, "mrl.diffusion.sft:DiffusionSFTLoop", diffusion.check_sft, **diffusion.OF_BOTH
    ),
}


def trainer_of(cfg: AnyConfig) -> Trainer[Any]:
    return TRAINERS[cfg.trainer]
