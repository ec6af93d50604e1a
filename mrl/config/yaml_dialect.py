"""YAML loader and dumper of mrl: scalars of YAML's core schema, with limits of size and depth.

Only true and false are booleans, 1e-6 is a number, and dates and sexagesimal numbers are strings. Tags are refused.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.composer import ComposerError

MAX_BYTES = 256 << 10
MAX_DEPTH = 50
MAX_NODES = 20_000  # with aliases expanded
MERGE = "<<"

_SCALARS = (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))"
        r"|\.(?:nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
)
_TAGS = (None, "!", "tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_Extent = tuple[int, int]  # nodes, levels


class Loader(yaml.SafeLoader):
    """Raises ComposerError, with its place, for a node that is too deep, too large, or contains itself."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[_Extent] = [(0, 0)]  # extents of the enclosing nodes, as far as they are read
        self._anchored: dict[str, _Extent] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Returns the node, or the target of an alias. Raises ComposerError for a tag, or too much depth or size."""
        event: Any = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        if not is_alias and event.tag not in _TAGS:
            raise self._refusal(event, f"the YAML tag {event.tag} is not supported")
        self._open.append((1, 1))
        if len(self._open) > MAX_DEPTH:
            raise self._refusal(event, f"nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        extent = self._open.pop()
        if is_alias and event.anchor not in self._anchored:
            raise self._refusal(event, f"the alias *{event.anchor} refers to a part of the file that contains it")
        if is_alias:
            extent = self._anchored[event.anchor]
        elif event.anchor is not None:
            self._anchored[event.anchor] = extent
        nodes, levels = self._open[-1]
        self._open[-1] = nodes, levels = nodes + extent[0], max(levels, extent[1] + 1)
        if nodes > MAX_NODES or len(self._open) + levels > MAX_DEPTH + 2:
            what = f"{MAX_NODES} values" if nodes > MAX_NODES else f"{MAX_DEPTH} levels"
            raise self._refusal(event, f"more than {what}, with aliases expanded")
        return node

    def _refusal(self, event: Any, message: str) -> ComposerError:
        return ComposerError(None, None, message, event.start_mark)


class Dumper(yaml.SafeDumper):
    """Quotes every string that `Loader` would read back as another value."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _SCALARS:
    for _dialect in (Loader, Dumper):
        _dialect.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})$"), _first)
