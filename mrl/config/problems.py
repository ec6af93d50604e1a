"""What is wrong with a configuration, and where it was written."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One mistake.

    keys: dotted key paths; the first is the one to change, the others are the ones that it disagrees with.
    places: where each key was written ("file.yaml:12", "override a.b=c"), filled in by the loader.
    unwritten: those of the keys that have their default; their place is their section's.
    """

    keys: tuple[str, ...]
    message: str
    places: tuple[str, ...] = ()
    unwritten: frozenset[str] = frozenset()

    def __str__(self) -> str:
        head, *others = [f"{key} (default)" if key in self.unwritten else key for key in self.keys]
        text = ": ".join(part for part in (*self.places[:1], head, self.message) if part)
        with_places = [
            label if key in self.unwritten else f"{label} ({place})"
            for key, label, place in zip(self.keys[1:], others, self.places[1:])
        ]
        return f"{text} [with {', '.join(with_places)}]" if with_places else text


class ConfigError(Exception):
    """Everything that is wrong with a configuration, all at once."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__("\n".join([f"{count} in {source}:", *(f"  {problem}" for problem in problems)]))


def reason(error: Exception) -> str:
    """An operating system's error without number and file name, any other as it is."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
