"""The trainers: for each its keys, what is checked between them, and the program that trains.

A new one is a file with its configuration, a file with its loop, and a row here; nothing else asks which trainer it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mrl.config.checks import rl as rl_checks
from mrl.config.checks.base import Archs
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.trainers import dpo, sft
from mrl.config.trainers.base import Config
from mrl.config.trainers.rl import RLConfig

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Trainer(Generic[C]):
    """What `trainer: NAME` means.

    schema: the keys of such a configuration
    main: "module:function" that takes it and trains, on every rank; by name, as reading a configuration imports no
    torch
    check: contradictions between its keys, beside those that every trainer is checked for
    check_files: what is wrong with files that only its keys name
    """

    schema: type[C]
    main: str
    check: Callable[[C, Archs, Machine], Iterator[Problem]]
    check_files: Callable[[C], Iterator[Problem]] = lambda cfg: iter(())

    def load_main(self) -> Callable[[C], None]:
        """The program, with all that it imports."""
        module, _, function = self.main.partition(":")
        found: Callable[[C], None] = getattr(importlib.import_module(module), function)
        return found


TRAINERS: dict[str, Trainer[Any]] = {  # by `trainer`
    "rl": Trainer(RLConfig, "mrl.trainers.rl.loop:main", rl_checks.check, rl_checks.check_files),
    "sft": Trainer(sft.SFTConfig, "mrl.trainers.sft:main", sft.check),
    "dpo": Trainer(dpo.DPOConfig, "mrl.trainers.dpo.loop:main", dpo.check),
}


def trainer_of(cfg: Config) -> Trainer[Any]:
    return TRAINERS[cfg.trainer]
