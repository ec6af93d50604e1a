"""What the checks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from mrl.config.problems import Problem
from mrl.families import ModelArch

Archs = Mapping[str, ModelArch | None]  # by Config.models()' names; None where one could not be read


def changed(section: BaseModel, *names: str) -> list[str]:
    """Which of these keys differ from their defaults. A default that is written out is not a contradiction."""
    fields, values = type(section).model_fields, dict(section)
    return [name for name in names if values[name] != fields[name].default]


def without_effect(section: BaseModel, key: str, names: Sequence[str], because: str, other: str) -> Iterator[Problem]:
    for name in changed(section, *names):
        yield Problem((f"{key}.{name}", other), f"has no effect: {because}")


def one_of(values: Sequence[int]) -> str:
    """1, 2 or 4; long lists are cut in the middle."""
    shown = [str(value) for value in (values if len(values) <= 9 else [*values[:4], *values[-4:]])]
    if len(values) > 9:
        shown.insert(4, "...")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
