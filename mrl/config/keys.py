"""Reads the keys of a configuration from the section classes: values, default and meaning.

The meaning of a key is its comment in the class, above the key or at the end of its line. A section without a comment
has the first sentence of its class's docstring.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mrl.config.sections.variants import Variants
from mrl.config.yaml_dialect import Dumper
from mrl.options.base import MAX_INT

_TYPES = {bool: "true | false", int: "integer", float: "number", str: "string"}
_BOUNDS = {Gt: (">", "gt"), Ge: (">=", "ge"), Lt: ("<", "lt"), Le: ("<=", "le")}


@dataclass(frozen=True)
class Key:
    """One key, with the keys below it.

    Attributes:
        path: dotted path; NAME stands for a name of the user's choice, and list indices are left out
        values: description of the accepted values
        default: default as YAML; None for a required key and for a section, whose keys have defaults of their own
        section: class of a section
        below: keys of a section
        only_with: (key, value) that the section must contain for this key to exist, such as ("loss_mode", "gspo")
        former: path with the former name of a renamed key
        kinds: variants of a section whose keys depend on the value of one of them
    """

    path: str
    values: str
    default: str | None
    is_required: bool
    meaning: str
    section: type[BaseModel] | None = None
    below: tuple[Key, ...] = ()
    only_with: tuple[str, str] | None = None
    former: str | None = None
    kinds: tuple[SectionVariant, ...] = ()

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def about(self) -> str:
        """Docstring of the section's class; empty for a key that is not a section."""
        return _docstring(self.section) if self.section else ""

    def is_called(self, written: str) -> bool:
        """True if `written` is the path of this key; for NAME it may have any name, or none."""
        return re.fullmatch(re.escape(self.path).replace(r"\.NAME", r"(\.[^.]+)?"), written) is not None


@dataclass(frozen=True)
class SectionVariant:
    """The keys that a section has only with one value of the key `by`.

    Attributes:
        noun: what the value selects, for messages, such as "estimator"
    """

    by: str
    value: str
    noun: str
    about: str
    keys: tuple[Key, ...]


@cache
def keys_of(section: type[BaseModel], prefix: str = "") -> tuple[Key, ...]:
    """Returns the keys of a section, in order of definition."""
    types = get_type_hints(section, include_extras=True)
    return tuple(_key(section, name, prefix + name, types[name]) for name in section.model_fields)


def walk(keys: Iterable[Key]) -> Iterator[Key]:
    """Yields each key, followed by all keys below it."""
    for key in keys:
        yield key
        yield from walk(key.below)


def nearest_keys(
    keys: Sequence[Key], path: Sequence[str], chosen: Collection[str] | None = None
) -> tuple[list[Key], list[Key]]:
    """Finds the keys that a misspelled key may mean.

    Args:
        path: the unknown key
        chosen: values that select variants of sections in the file

    Returns:
        (keys beside the unknown key, candidates). Candidates are the first of these that exist: a close name beside it;
        the same name elsewhere; a close name in another variant of the section; a less close name beside it.
    """
    there = list(keys)
    for part in path[:-1]:
        there = [below for key in there if key.name == part for below in key.below] or there
    beside = _once(key for key in there if not (chosen and key.only_with) or key.only_with[1] in chosen)
    same = _once(key for key in walk(keys) if key.name == path[-1])
    elsewhere = [key for key in same if ".NAME." not in key.path] or same
    found = _close(beside, path[-1], 0.75) or elsewhere or _close(_once(there), path[-1], 0.75)
    return beside, found or _close(beside, path[-1], 0.5)


def _once(keys: Iterable[Key]) -> list[Key]:
    return list({key.path: key for key in keys}.values())


def _close(keys: Sequence[Key], name: str, cutoff: float) -> list[Key]:
    """Returns the keys with the closest name, if it is close enough."""
    meant = difflib.get_close_matches(name, [key.name for key in keys], n=1, cutoff=cutoff)
    return [key for key in keys if key.name in meant]


def _key(
    section: type[BaseModel],
    name: str,
    path: str,
    annotation: Any,
    only_with: tuple[str, str] | None = None,
    former: str | None = None,
) -> Key:
    field, inner = section.model_fields[name], _section_in(annotation)
    owner = next(cls for cls in section.__mro__ if name in cls.__annotations__)
    own = field.is_required() or isinstance(field.default, BaseModel)
    kinds = tuple(_kinds(annotation, f"{path}."))
    about = re.split(r"(?<=\.)\s", _docstring(inner))[0].replace("\n", " ").removesuffix(".") if inner else ""
    below = keys_of(inner, f"{path}.NAME." if get_origin(annotation) is dict else f"{path}.") if inner else ()
    return Key(
        path,
        _values(annotation),
        None if own else _written(field.default),
        field.is_required(),
        _comments(owner.__module__)[owner.__name__, name] or about,
        inner,
        (*below, *(key for kind in kinds for key in kind.keys)),
        only_with,
        former,
        kinds,
    )


def _kinds(annotation: Any, prefix: str) -> Iterator[SectionVariant]:
    for mark in get_args(annotation):
        if isinstance(mark, Variants):
            for value, options in mark.kinds.items():
                types, only_with = get_type_hints(options, include_extras=True), (mark.by, value)
                former = {new: prefix + old for old, new in options.renamed.items()}
                keys = tuple(
                    _key(options, name, prefix + name, types[name], only_with, former.get(name))
                    for name in options.model_fields
                )
                yield SectionVariant(mark.by, value, mark.noun, _docstring(options), keys)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Returns the class of the section in this type, also inside a dict, a list or an optional."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _section_in(part))), None)


def _docstring(section: type[BaseModel]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def _values(annotation: Any) -> str:
    """Describes the values of this type in YAML: `integer > 0 or null`, `[string, ...]`, `k1 | k2`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        said = [note.description for note in parts[1:] if isinstance(note, FieldInfo) and note.description]
        return said[0] if said else " ".join([_values(parts[0]), *_bounds(parts[1:])])
    if origin is Literal:
        return " | ".join(parts)
    if origin in (Union, UnionType):
        null = ["null"] if NoneType in parts else []
        return " or ".join([*(_values(part) for part in parts if part is not NoneType), *null])
    if origin is tuple:
        return f"[{_values(parts[0])}, ...]"
    if origin is dict:
        return f"{{NAME: {_values(parts[1])}, ...}}"
    return "section" if _section_in(annotation) else _TYPES[annotation]


def _bounds(notes: Iterable[Any]) -> Iterator[str]:
    limits = [limit for note in notes if isinstance(note, FieldInfo) for limit in note.metadata]
    signed = [(sign, getattr(limit, name)) for limit in limits for sign, name in [_BOUNDS[type(limit)]]]
    if shown := [f"{sign} {number}" for sign, number in signed if number < MAX_INT]:
        yield ", ".join(shown)


def _written(value: Any) -> str:
    """Formats a default as YAML, with numbers as people write them (1e-6)."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0").replace("e-0", "e-")
    style = '"' if isinstance(value, str) and not value.isprintable() else None  # escapes a line break
    text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, default_style=style, width=1000)
    return text.removesuffix("...\n").strip()


@cache
def _comments(module: str) -> Mapping[tuple[str, str], str]:
    """Returns (class, key) -> the comments between the previous statement and the end of the key, joined."""
    source = inspect.getsource(sys.modules[module])
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for cls in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        last = cls.lineno
        for node in cls.body:
            end = node.end_lineno or last
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own = [comments[line] for line in range(last + 1, end + 1) if line in comments]
                found[cls.name, node.target.id] = " ".join(own)
            last = end
    return found
