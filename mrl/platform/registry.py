"""Registry of adaptations that Megatron-Core needs on this machine, by name.

An adaptation is a small function with its reason and a check that it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    BEFORE_IMPORT = "before megatron.core is imported"
    AFTER_IMPORT = "after megatron.core is imported"


@dataclass(frozen=True)
class Adaptation:
    name: str
    why: str
    stage: Stage
    needed: Callable[[], bool]
    apply: Callable[[], None]


REGISTRY: dict[str, Adaptation] = {}


def adaptation(
    name: str, *, why: str, stage: Stage, needed: Callable[[], bool]
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers the decorated function under `name`."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        REGISTRY[name] = Adaptation(name, why, stage, needed, function)
        return function

    return register
