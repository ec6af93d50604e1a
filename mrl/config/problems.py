"""What is wrong with a configuration, and where it was written."""

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
        return printable(f"{text} [with {', '.join(with_places)}]" if with_places else text)


class ConfigError(Exception):
    """Everything that is wrong with a configuration, all at once."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = [f"  {problem}" for problem in problems[:MAX_SHOWN]]
        lines += [f"  ... and {len(problems) - MAX_SHOWN} more"] if len(problems) > MAX_SHOWN else []
        super().__init__(redact("\n".join([f"{count} in {printable(source)}:", *lines])))


def reason(error: Exception) -> str:
    """An operating system's error without number and file name, any other as it is."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def not_a_file(path: Path) -> str | None:
    """What this is instead of a file; links are followed. OSError if there is nothing, ValueError for no path."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        return None
    return "it is a directory" if stat.S_ISDIR(mode) else "it is a device, a pipe or a socket, not a file"


def printable(text: str) -> str:
    """On one line, whatever it holds: control characters and bytes that are not UTF-8 as escapes."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
