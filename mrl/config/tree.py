"""YAML as a tree whose every key remembers where it was written, with `base:` files and overrides merged in.

The dialect is YAML's core schema: true and false are the only booleans, 1e-6 is a number, dates and sexagesimal numbers
do not exist, and a key written twice is a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mrl.config.problems import Problem, reason

_SCALARS = (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", [*"-+0123456789"]),
    ("float", r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)", [*"-+.0123456789"]),
)
_OVERRIDE = re.compile(r"(\w+(?:\.\w+)*)=(.*)", re.DOTALL)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


class Dumper(yaml.SafeDumper):
    """Quotes whatever `_Loader` would not read back as the same string."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _SCALARS:
    for _dialect in (_Loader, Dumper):
        _dialect.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"(?:{_pattern})$"), _first)


@dataclass
class Node:
    """A value and where it was written. Mappings hold Nodes; lists are tuples of plain values."""

    place: str
    value: Any

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return self.value

    def find(self, path: Sequence[str]) -> tuple[Node, int]:
        """The deepest Node on the path, and how many of its keys were found."""
        node = self
        for depth, key in enumerate(path):
            if not isinstance(node.value, dict) or key not in node.value:
                return node, depth
            node = node.value[key]
        return node, len(path)

    def drop(self, path: Sequence[str]) -> None:
        parent, depth = self.find(path[:-1])
        if depth == len(path) - 1 and isinstance(parent.value, dict):
            parent.value.pop(path[-1], None)


def read(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Node | None, list[Problem]]:
    """The merged tree of a file, the files it is based on, and the overrides; None if a file cannot be read at all."""
    problems: list[Problem] = []
    tree = _read_file(Path(path), (), f"{path}:1", problems)
    for text in overrides:
        override = _read_override(text, problems)
        if tree is not None and override is not None:
            tree = _merge(tree, override, keep_place=True)
    return tree, problems


def _read_file(path: Path, children: tuple[Path, ...], place: str, problems: list[Problem]) -> Node | None:
    """`children`: the files whose `base:` led here; `place`: where this file was named."""
    key = "base" if children else ""
    if path.resolve() in children:
        chain = " -> ".join(str(p) for p in (*children, path.resolve()))
        problems.append(Problem((key,), f"files are based on each other: {chain}", (place,)))
        return None
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(Problem((key,), f"cannot read {path}: {reason(error)}", (place,)))
        return None
    tree = _parse(text, str(path), problems)
    if tree is None or isinstance(tree.value, dict):
        return tree and _on_its_base(tree, path, children, problems)
    problems.append(Problem(("",), f"expected a mapping of keys, got {describe(tree.value)}", (tree.place,)))
    return None


def _on_its_base(tree: Node, path: Path, children: tuple[Path, ...], problems: list[Problem]) -> Node | None:
    base = tree.value.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base.value, str):
        problems.append(Problem(("base",), f"must be a file name, got {describe(base.value)}", (base.place,)))
        return None
    below = _read_file(path.parent / base.value, (*children, path.resolve()), base.place, problems)
    return below and _merge(below, tree)


def _read_override(text: str, problems: list[Problem]) -> Node | None:
    place = f"override {text}"
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        problems.append(Problem(("",), "expected KEY=VALUE, such as actor.optimizer.lr=1e-6", (place,)))
        return None
    node = _parse(match[2], place, problems, numbered=False)
    for key in reversed(match[1].split(".")):
        node = node and Node(place, {key: node})
    return node


def _parse(text: str, source: str, problems: list[Problem], numbered: bool = True) -> Node | None:
    """None when the text is no YAML (the problem is noted). `numbered`: places carry line numbers."""
    loader = _Loader(text)

    def place(mark: yaml.Mark | None) -> str:
        return f"{source}:{mark.line + 1}" if numbered and mark is not None else source

    def convert(node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = (convert(item, f"{path}.{i}") for i, item in enumerate(node.value))
            return tuple(Node("", item).plain() for item in items)
        return loader.construct_object(node)

    def mapping(node: yaml.MappingNode, path: str) -> dict[str, Node]:
        found: dict[str, Node] = {}
        for key_node, value_node in node.value:
            here, key = place(key_node.start_mark), str(key_node.value)
            full = f"{path}.{key}".removeprefix(".")
            if key in found:
                problems.append(Problem((full,), f"written twice, first at {found[key].place}", (here,)))
            found[key] = Node(here, convert(value_node, full))
        return found

    try:
        root = loader.get_single_node()
        return Node(place(root.start_mark if root else None), convert(root, "") if root else None)
    except yaml.MarkedYAMLError as error:
        message = " ".join(part for part in (error.context, error.problem) if part)
        problems.append(Problem(("",), f"not valid YAML: {message}", (place(error.problem_mark),)))
    except (yaml.YAMLError, ValueError) as error:
        problems.append(Problem(("",), f"not valid YAML: {error}", (source,)))
    finally:
        loader.dispose()
    return None


def _merge(base: Node, over: Node, keep_place: bool = False) -> Node:
    """`over` on top of `base`: mappings key by key, everything else (lists too) replaced.

    A section written in both is placed where `over` has it, or with `keep_place` where `base` has it.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = _merge(merged[key], child, keep_place) if key in merged else child
    return Node(base.place if keep_place else over.place, merged)


def describe(value: Any) -> str:
    """A value as a person would name it: 'four' (a string), null, a list."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"{value!r} (a string)"
    if isinstance(value, (int, float)):
        return f"{value} (a number)"
    return "a list" if isinstance(value, (tuple, list)) else "a section"
