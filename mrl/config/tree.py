"""YAML as a tree in which every key records where it was written, with `base:` files and overrides merged in.

A key written twice is a mistake. `<<: *name` merges the keys of another section; keys written beside it take
precedence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from mrl.config.problems import Problem, not_a_file, printable, reason, shortened
from mrl.config.yaml_dialect import MAX_BYTES, MERGE, Loader

_OVERRIDE = re.compile(r"(\w{1,200}(?:\.\w{1,200})*)=(.*)", re.DOTALL)
_KEY = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,200}")
_NO_TEXT = re.compile(r"[\x00\ud800-\udfff]")
MAX_BASES = 20
Source = str | Path | Mapping[str, Any]  # a file, or a YAML tree of plain values


@dataclass
class Node:
    """A value and the place where it was written. A mapping holds Nodes; a list is a tuple of plain values."""

    place: str
    value: Any

    def plain(self) -> Any:
        """Returns the value without places: mappings of plain values, and leaves unchanged."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return self.value

    def find(self, path: Sequence[str]) -> tuple[Node, int]:
        """Returns the deepest existing Node on the path, and the number of keys found."""
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


def read(source: Source, overrides: Sequence[str] = ()) -> tuple[Node | None, list[Problem]]:
    """Returns the merged tree of a file or a dict, its base files and the overrides, with the problems found.

    The tree is None if a file cannot be read at all.
    """
    problems: list[Problem] = []
    if isinstance(source, Mapping):
        tree = _on_its_base(_from_plain(source), Path(name_of(source)), (), problems)
    else:
        tree = _read_file(Path(source), (), f"{source}:1", problems)
    for text in overrides:
        override = _read_override(text, problems)
        if tree is not None and override is not None:
            tree = _merge(tree, override, keep_place=True)
    return tree, problems


def name_of(source: Source) -> str:
    """Returns the name of a file, "config" for a dict."""
    return "config" if isinstance(source, Mapping) else str(source)


def _from_plain(value: Any) -> Node:
    """Returns the tree of a YAML tree that Python made; lists may be tuples, and paths objects."""
    if isinstance(value, Mapping):
        return Node("config", {str(key): _from_plain(child) for key, child in value.items()})
    if isinstance(value, list | tuple):
        return Node("config", tuple(_from_plain(item).plain() for item in value))
    return Node("config", os.fspath(value) if isinstance(value, os.PathLike) else value)


def read_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the tree of KEY=VALUE texts alone. `read` has reported any mistakes in them before."""
    tree = Node("", {})
    for override in (_read_override(text, []) for text in texts):
        tree = tree if override is None else _merge(tree, override, keep_place=True)
    plain: dict[str, Any] = tree.plain()
    return plain


def _read_file(path: Path, children: tuple[Path, ...], place: str, problems: list[Problem]) -> Node | None:
    """Reads a file and its base files. `children`: files whose `base:` led here; `place`: where this file was named."""
    key = "base" if children else ""
    try:
        if path.resolve() in children or len(children) > MAX_BASES:
            chain = " -> ".join(str(p) for p in (*children, path.resolve())[: MAX_BASES // 4])
            what = "form a circle" if path.resolve() in children else f"are more than {MAX_BASES} levels deep"
            problems.append(Problem((key,), f"bases {what}: {chain}", (place,)))
            return None
        if str(path) != printable(str(path)):
            raise ValueError("its name contains a control character or bytes that are not UTF-8")
        if problem := not_a_file(path):
            raise ValueError(problem)
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ValueError(f"{size} bytes; the limit for a configuration is {MAX_BYTES}")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
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
    below = _read_file(path.parent / os.path.expanduser(base.value), (*children, path.resolve()), base.place, problems)
    return below and _merge(below, tree)


def _read_override(text: str, problems: list[Problem]) -> Node | None:
    place = f"override {shortened(printable(text))}"
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        problems.append(Problem(("",), "expected KEY=VALUE, such as actor.optimizer.lr=1e-6", (place,)))
        return None
    node = _parse(match[2], place, problems, numbered=False)
    for key in reversed(match[1].split(".")):
        node = node and Node(place, {key: node})
    return node


def _parse(text: str, source: str, problems: list[Problem], numbered: bool = True) -> Node | None:
    """Parses YAML; None if invalid, with the problem noted. `numbered`: places have line numbers."""

    def note(message: str, line: int | None) -> None:
        place = f"{source}:{line + 1}" if numbered and line is not None else source
        problems.append(Problem(("",), f"not valid YAML: {printable(message)}", (place,)))

    try:
        loader = Loader(text)
        try:
            return _Conversion(loader, source, numbered, problems).root()
        finally:
            loader.dispose()
    except ReaderError as error:
        what = f"the character U+{ord(text[error.position]):04X} is not allowed"
        note(what, text.count("\n", 0, error.position))
    except yaml.MarkedYAMLError as error:
        message = " ".join(part for part in (error.context, error.problem) if part)
        note(message, error.problem_mark.line if error.problem_mark is not None else None)
    except _NoValue as error:
        problems.append(error.problem)
    return None


class _NoValue(Exception):
    """A value that no key can have."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem


class _Conversion:
    """Converts YAML nodes into Nodes, and notes problems of single values."""

    def __init__(self, loader: Loader, source: str, numbered: bool, problems: list[Problem]) -> None:
        self.loader, self.source, self.numbered, self.problems = loader, source, numbered, problems

    def root(self) -> Node:
        root = self.loader.get_single_node()
        return Node(self._place(root), self._value(root, "")) if root else Node(self.source, None)

    def _place(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.numbered else self.source

    def _problem(self, node: yaml.Node, path: str, message: str) -> Problem:
        return Problem((path,), message, (self._place(node),))

    def _note(self, node: yaml.Node, path: str, message: str) -> None:
        problem = self._problem(node, path, message)
        if problem not in self.problems:  # an alias is converted, and checked, at every use
            self.problems.append(problem)

    def _value(self, node: yaml.Node, path: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            items = (self._value(item, f"{path}.{i}") for i, item in enumerate(node.value))
            return tuple(Node("", item).plain() for item in items)
        try:
            value = self.loader.construct_object(node)
        except ValueError:
            raise _NoValue(self._problem(node, path, f"a number of {len(node.value)} digits")) from None
        if isinstance(value, str) and (found := _NO_TEXT.search(value)):
            what = f"{describe(value)} contains the character U+{ord(found[0]):04X}, which is not text"
            raise _NoValue(self._problem(node, path, what))
        return value

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Node]:
        found: dict[str, Node] = {}
        merged: dict[str, Node] | None = None
        for key_node, value_node in node.value:
            here, key = self._place(key_node), str(key_node.value)
            full = f"{path}.{key}".removeprefix(".")
            if not isinstance(key_node, yaml.ScalarNode) or not _KEY.fullmatch(key):
                what = describe(key) if isinstance(key_node, yaml.ScalarNode) else "a list or a section"
                self._note(key_node, path, f"a key must be a name, got {what}")
            elif key == MERGE and key_node.style is None:
                if merged is not None:
                    self._note(key_node, full, f"written twice: one {MERGE} takes a list of sections")
                merged = self._merged(value_node, path)
            else:
                if key in found:
                    self._note(key_node, full, f"written twice, first at {found[key].place}")
                found[key] = Node(here, self._value(value_node, full))
        return (merged or {}) | found

    def _merged(self, node: yaml.Node, path: str) -> dict[str, Node]:
        """Returns the keys of a section, or of a list of sections; the first section that has a key decides."""
        found: dict[str, Node] = {}
        for section in reversed(node.value) if isinstance(node, yaml.SequenceNode) else [node]:
            if isinstance(section, yaml.MappingNode):
                found |= self._mapping(section, path)
            else:
                self._note(node, path, f"{MERGE} takes a section or a list of them, such as {MERGE}: *name")
        return found


def _merge(base: Node, over: Node, keep_place: bool = False) -> Node:
    """Merges `over` on top of `base`: mappings key by key; everything else, lists too, is replaced.

    A section that both have is placed where `over` has it, or with `keep_place` where `base` has it.
    """
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, child in over.value.items():
        merged[key] = _merge(merged[key], child, keep_place) if key in merged else child
    return Node(base.place if keep_place else over.place, merged)


def describe(value: Any) -> str:
    """Describes a value for a message: 'four' (a string), null, a list."""
    if value is None:
        return "null (nothing)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"{shortened(value)!r} (a string)"
    if isinstance(value, (int, float)):
        return f"{shortened(str(value))} (a number)"
    return "a list" if isinstance(value, (tuple, list)) else "a section"
