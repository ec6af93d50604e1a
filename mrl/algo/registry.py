"""Registry of functions by the names that configurations use."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Functions by name. `kind` names the entries in error messages, e.g. "advantage estimator"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, F] = {}

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator that registers the function under each of `names`.

        Raises ValueError for a name registered twice.
        """

        def add(function: F) -> F:
            for name in names:
                if name in self._entries:
                    raise ValueError(f"{self.kind} {name!r} is registered twice")
                self._entries[name] = function
            return function

        return add

    def get(self, name: str) -> F:
        """Returns the function called `name`.

        Raises ValueError with the nearest name and all names if there is none.
        """
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown {self.kind} {name!r}{hint} (known: {', '.join(self.names())})")

    def names(self) -> list[str]:
        return sorted(self._entries)


def arguments(function: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are arguments of the function."""
    return {name: options[name] for name in inspect.signature(function).parameters if name in options}
