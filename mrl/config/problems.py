"""Mistakes in a configuration, with the place where each was written."""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from pathlib import Path

from mrl.redaction import redact

MAX_SHOWN = 50
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(frozen=True)
class Problem:
    """One mistake.

    Attributes:
        keys: dotted key paths: first the key to change, then the keys that it conflicts with
        places: where each key was written ("file.yaml:12", "override a.b=c"), set by the loader
        unwritten: keys that have their default; their place is the place of their section
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
        return printable(f"{text} [with {', '.join(with_places)}]" if with_places else text)


class ConfigError(Exception):
    """Every mistake in a configuration, in one message."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"  {problem}" for problem in problems[:MAX_SHOWN]]
        lines += [f"  ... and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        super().__init__(redact("\n".join([f"{count} in {printable(source)}:", *lines])))


def reason(error: Exception) -> str:
    """Returns the text of an operating system error without number and file name; other errors unchanged."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def not_a_file(path: Path) -> str | None:
    """Returns what the path is instead of a file, or None for a file; follows links.

    Raises OSError if it does not exist, and ValueError if the text is not a path.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return None
    return "it is a directory" if stat.S_ISDIR(mode) else "it is a device, a pipe or a socket, not a file"


def printable(text: str) -> str:
    """Returns the text on one line, with control characters and bytes that are not UTF-8 escaped."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
