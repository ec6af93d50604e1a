"""Every rule between keys. The rules are pure functions, so that mistakes are known before a process starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mrl.config.checks import data, layout, lora, models, precision, run, vision
from mrl.config.checks.base import Archs
from mrl.config.derived import Machine
from mrl.config.problems import Problem, printable
from mrl.config.trainers.base import AnyConfig, Config, renamed
from mrl.config.trainers.table import trainer_of

MAX_SECONDS = 2e6  # operating systems store timeouts as milliseconds in 31 bits
SEVERAL_LINES = ("rollout.sampling.stop", "reward.format.pattern", "model.eos_token", "data.step_separator")


def check_all(cfg: AnyConfig, machine: Machine) -> list[Problem]:
    """Runs `check`, after checks of the files that the configuration names."""
    problems = [] if machine.planned else [*data.check_sources(cfg), *trainer_of(cfg).check_files(cfg)]
    archs = models.read_archs(cfg, problems, shapes_only=machine.planned) if isinstance(cfg, Config) else {}
    problems += check(cfg, archs, machine)
    for part, moved in cfg.parts():
        found = [
            replace(each, keys=tuple(renamed(key, moved) for key in each.keys)) for each in check_all(part, machine)
        ]
        problems += [problem for problem in found if problem not in problems]
    return problems


def check(cfg: AnyConfig, archs: Archs, machine: Machine) -> list[Problem]:
    """Returns contradictions, impossible layouts and settings without effect, each with all keys involved."""
    problems = list(layout.check(cfg, archs, machine))
    problems += _values(cfg.model_dump())
    problems += run.check(cfg, machine)
    if isinstance(cfg, Config):
        problems += models.check(cfg, archs, machine)
        problems += precision.check(cfg, archs, machine)
        problems += lora.check(cfg, archs)
        problems += vision.check(cfg, archs)
        problems += data.check_answers(cfg, archs)
    return problems + list(trainer_of(cfg).check(cfg, archs, machine))


def _values(value: Any, key: str = "") -> Iterator[Problem]:
    """Checks that strings are one line, and that times are short enough to wait for."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield from _values(below, f"{key}.{name}".removeprefix("."))
    elif isinstance(value, tuple):
        for item in value:  # sections in a list are reported under the list's key
            yield from _values(item if not isinstance(item, dict) else tuple(item.values()), key)
    elif isinstance(value, str) and value != printable(value) and key not in SEVERAL_LINES:
        yield Problem((key,), f"{value!r} contains a line break or another control character")
    elif isinstance(value, float) and value > MAX_SECONDS and any(part.endswith("_s") for part in key.split(".")):
        yield Problem((key,), f"{value:g} s is longer than the maximum of {MAX_SECONDS:g} s")
