"""Helpers of the checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from mrl.config.problems import Problem
from mrl.config.sections.models import RefConfig
from mrl.config.sections.preference import PreferenceRefConfig
from mrl.families import ModelArch

Archs = Mapping[str, ModelArch | None]  # by the names of Config.models(); None: config.json could not be read


def changed(section: BaseModel, *names: str) -> list[str]:
    """Returns the keys that differ from their defaults. A default that a file writes out is not a contradiction."""
    fields, values = type(section).model_fields, dict(section)
    return [name for name in names if values[name] != fields[name].default]


def without_effect(section: BaseModel, key: str, names: Sequence[str], because: str, other: str) -> Iterator[Problem]:
    """Yields a problem for each of these keys that is not at its default, because key `other` makes it ineffective."""
    for name in changed(section, *names):
        yield Problem((f"{key}.{name}", other), f"has no effect: {because}")


def check_refresh(ref: RefConfig | PreferenceRefConfig, steps: int) -> Iterator[Problem]:
    """Checks when a reference is refreshed, in a run of `steps` steps."""
    every = ref.refresh_every_steps
    if ref.policy != "refreshed":
        names, because = ["refresh_every_steps", "refresh_share"], f"the reference is {ref.policy}"
        yield from without_effect(ref, "ref", names, because, "ref.policy")
    elif every is None:
        yield Problem(("ref.refresh_every_steps", "ref.policy"), "required by refreshed")
    elif every >= steps:
        message = f"{every} steps of {steps}: the reference would never be refreshed"
        yield Problem(("ref.refresh_every_steps", "run.steps"), message)


def check_positions(key: str, tokens: int | None, arch: ModelArch | None) -> Iterator[Problem]:
    """Checks that the model has as many positions as `key` asks for."""
    if tokens is not None and arch is not None and tokens > arch.max_positions:
        yield Problem((key, "model.path"), f"{tokens} exceeds the model's {arch.max_positions} positions")


def one_of(values: Sequence[int]) -> str:
    """Formats numbers as "1, 2 or 4"; shortens long lists in the middle."""
    shown = [str(value) for value in (values if len(values) <= 9 else [*values[:4], *values[-4:]])]
    if len(values) > 9:
        shown.insert(4, "...")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
