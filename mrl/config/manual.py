"""`mrl config`: describes the keys of a configuration, as text and as docs/configuration.md."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache

from mrl.config.keys import Key, keys_of, nearest_keys, walk
from mrl.config.problems import printable
from mrl.config.trainers.base import AnyConfig
from mrl.config.trainers.table import TRAINERS

COMMAND = "mrl config --markdown > docs/configuration.md"
_WIDTHS = (60, 120)  # minimum and maximum width of the text
_INTRODUCTION = f"""<!-- Generated from mrl/config/sections and mrl/options; after a change there: {COMMAND} -->
# Configuration

All keys, as `mrl config`, `mrl config rollout` and `mrl config rollout.mismatch.stop` print them. In a file, sections
are mappings; on the command line, keys are dotted: `actor.optimizer.lr=1e-6`. `base: other.yaml` starts from another
file. NAME stands for a name of your choice. A key without a default is required; a section has the defaults of its
keys.
"""


class UnknownKey(Exception):
    """No such section or key; the message suggests the nearest ones."""


@cache
def manual() -> dict[Key, str]:
    """Returns top-level key -> the trainers that have it. A key that differs between trainers occurs several times."""
    found: dict[Key, list[str]] = {}
    schemas: dict[str, type[AnyConfig]] = {name: trainer.schema for name, trainer in TRAINERS.items()}
    for name, schema in schemas.items():
        for key in keys_of(schema):
            found.setdefault(key, []).append(name)
    order = list(dict.fromkeys(key.path for key in found))
    return {key: ", ".join(found[key]) for key in sorted(found, key=lambda key: order.index(key.path))}


def text(path: str | None = None) -> str:
    """Returns the page of a section or key; for None, one line per section. Raises UnknownKey."""
    if path is None:
        names, trainers = max(len(key.path) for key in manual()), max(map(len, manual().values()))
        lines = [f"{key.path:<{names}}  {of:<{trainers}}  {_overview_of(key)}" for key, of in manual().items()]
        more = "mrl config SECTION or mrl config KEY, such as rollout, actor.optimizer or rollout.mismatch.stop"
        return "\n".join([*lines, "", f"Details: {more}"])
    pages = [
        "\n".join(_page(key, trainers))
        for top, trainers in manual().items()
        for key in walk([top])
        if key.is_called(path)
    ]
    if not pages:
        _, meant = nearest_keys([*manual()], path.split("."))
        chosen = [key.path for key in walk(manual()) for kind in key.kinds if kind.value == path]
        near = f"did you mean {' or '.join(key.path for key in meant[:3])}?" if meant else "see `mrl config`"
        near = f"see `mrl config {'` and `mrl config '.join(chosen)}`" if chosen else near
        raise UnknownKey(printable(f"{path!r} is not a section or key of a configuration: {near}"))
    return "\n\n".join(pages)


def markdown() -> str:
    """Returns docs/configuration.md: a table of the top-level keys, then one chapter per section class."""
    places: dict[type, list[tuple[Key, str]]] = {}
    for top, trainers in manual().items():
        for key in walk([top]):
            if key.section:
                places.setdefault(key.section, []).append((key, trainers))
    headings = {key: f"`{found[0][0].path}` ({found[0][1]})" for found in places.values() for key, _ in found}
    tops = [(_cell(key, headings), of, _overview_of(key)) for key, of in manual().items()]
    parts = [_INTRODUCTION, _table(("key", "trainer", "what it is"), tops)]
    parts += [_chapter(found, headings) for found in places.values()]
    return "\n".join(parts)


def _chapter(same: list[tuple[Key, str]], headings: dict[Key, str]) -> str:
    """Renders one section class; it may occur at several paths, each with its trainers."""
    (first, _), *others = same
    places = [f"`{key.path}`{f' ({of})' if key.path == first.path else ''}" for key, of in others]
    also = f"\nAlso {', '.join(places)}.\n" if places else ""
    common = _keys_table([key for key in first.below if not key.only_with], headings)
    kinds = [
        f"\n### `{kind.by}: {kind.value}`\n\n{kind.about}\n"
        + (f"\n{_keys_table(kind.keys, headings)}" if kind.keys else "")
        for kind in first.kinds
    ]
    return f"## {headings[first]}\n{also}\n{first.about}\n\n{common}{''.join(kinds)}"


def _keys_table(keys: Sequence[Key], headings: dict[Key, str]) -> str:
    rows = [
        (_cell(key, headings), f"`{key.default}`" if key.default is not None else "", key.values, key.meaning)
        for key in keys
    ]
    return _table(("key", "default", "values", "meaning"), rows)


def _cell(key: Key, headings: dict[Key, str]) -> str:
    """Renders the name of a key, linked to its chapter if there is one."""
    if key not in headings:
        return f"`{key.name}`"
    anchor = re.sub(r"[^\w -]", "", headings[key].lower()).replace(" ", "-")
    return f"[`{key.name}`](#{anchor})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _overview_of(key: Key) -> str:
    return key.meaning if key.section else f"{key.values}: {key.meaning}"


def _page(key: Key, trainers: str) -> Iterator[str]:
    only = f"; only with {': '.join(key.only_with)}" if key.only_with else ""
    yield f"{_line(key, key.path)}; trainer: {trainers}{only}"
    if not " ".join(key.about.split()).startswith(key.meaning):
        yield from _indented(key.meaning)
    if key.about:
        yield textwrap.indent(key.about, "    ")
    yield from _keys_below([below for below in key.below if not below.only_with])
    for kind in key.kinds:
        yield f"\nwith {kind.by}: {kind.value}"
        yield textwrap.indent(kind.about, "    ")
        yield from _keys_below(kind.keys)


def _keys_below(keys: Sequence[Key]) -> Iterator[str]:
    for key in keys:
        yield f"\n{_line(key, key.name)}"
        yield from _indented(key.meaning)
        yield from [f"    more: mrl config {key.path}"] if key.below else []


def _line(key: Key, name: str) -> str:
    """Renders a key with its default and values: `stop: 1  # number > 0 or null`."""
    default = f" {key.default}" if key.default is not None else ""
    return f"{name}:{default}  # {key.values}{', required' if key.is_required else ''}"


def _indented(meaning: str) -> list[str]:
    least, most = _WIDTHS
    width = max(least, min(most, shutil.get_terminal_size().columns))
    return textwrap.wrap(meaning, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
