"""Plain values: what a shut-in program claims that its calls gave, and expressions over them, evaluated without it.

A value is None or of exactly bool, int, float, complex, str, bytes, list, tuple, dict, set or frozenset, or `Items` of
something else that can only be iterated. Neither text from a program nor an expression from a data set can do more
here than be wrong: both are bounded in size, and nothing is called but what FUNCTIONS and METHODS name.
"""

from __future__ import annotations

import ast
import collections
import json
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 100
MAX_HASHED = 10_000  # keys and members of one value: enough of them with one hash would take minutes
MAX_ITEMS = 1_000_000  # of what an expression makes
MAX_BITS = 1_000_000


class NotPlain(ValueError):
    """Not a value or an expression of this module, or too large a one."""


@dataclass(frozen=True)
class Items:
    """What a generator, a view or the like holds: equal to nothing but itself."""

    values: list[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True)
class Claimed:
    """Stands in an expression's Constant for the claim of this number."""

    number: int


def decode(line: bytes) -> list[Any] | None:
    """The values of one line of `answer_calls`; None where something was raised. Raises NotPlain if it is no such
    line."""
    try:
        found = json.loads(line)
        return None if found is None else _Decoder().items(found, 0)
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise NotPlain(str(error)) from None


class _Decoder:
    def __init__(self) -> None:
        self.hashed = 0

    def items(self, found: Any, depth: int) -> list[Any]:
        if type(found) is not list or depth > MAX_DEPTH:
            raise NotPlain("no list, or too deep")
        return [self.value(item, depth) for item in found]

    def value(self, found: Any, depth: int) -> Any:
        if found is None or type(found) in (bool, str):
            return found
        kind, content = found
        if kind in ("int", "float", "complex", "bytes"):
            return _SCALARS[kind](content)
        values = self.items(content, depth + 1)
        if kind in ("set", "frozenset", "dict"):
            self.hashed += len(values)
            if self.hashed > MAX_HASHED:
                raise NotPlain(f"more than {MAX_HASHED} keys and members")
        return _CONTAINERS[kind](values)


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": bytes.fromhex,
}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    **{kind.__name__: kind for kind in (list, tuple, set, frozenset, dict)},
    "items": Items,
}


def _hashed(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(items: Any = ()) -> Any:
        if len(items) > MAX_HASHED:
            raise NotPlain(f"more than {MAX_HASHED} members")
        return make(items)

    return made


def _range(*bounds: int) -> list[int]:
    if len(range(*bounds)) > MAX_ITEMS:
        raise NotPlain(f"more than {MAX_ITEMS} items")
    return list(range(*bounds))


TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, all, any, bool, float, int, isinstance, len, list, max, min, round, sorted, str)},
    **{f.__name__: f for f in (sum, tuple, type)},
    **{f.__name__: _hashed(f) for f in (dict, set, frozenset)},
    "range": _range,
    "zip": lambda *lists: list(zip(*lists)),
    "enumerate": lambda items, start=0: list(enumerate(items, start)),
    "collections.Counter": _hashed(collections.Counter),
    **{f"math.{f.__name__}": f for f in (math.isclose, math.fabs, math.sqrt, math.isnan, math.isinf, math.floor)},
    "math.ceil": math.ceil,
}
METHODS: dict[type, tuple[str, ...]] = {
    str: ("split", "strip", "lower", "upper"),
    dict: ("items", "keys", "values"),
}
MATH = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "inf", "nan", "tau")}

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


def evaluate(node: ast.expr, claims: Sequence[Any] = ()) -> Any:
    """The value of an expression whose calls are named as FUNCTIONS has them; NotPlain, or what Python raises."""

    def value(node: ast.expr) -> Any:
        return evaluate(node, claims)

    match node:
        case ast.Constant(value=Claimed(number=number)):
            return claims[number]
        case ast.Constant():
            return node.value
        case ast.List() | ast.Tuple() | ast.Set():
            items = [value(item) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items) if isinstance(node, ast.Tuple) else set(items)
        case ast.Dict():
            keys = [key for key in node.keys if key is not None]
            return {value(key): value(item) for key, item in zip(keys, node.values, strict=True)}
        case ast.UnaryOp():
            return _UNARY[type(node.op)](value(node.operand))
        case ast.BinOp():
            return _binary(node.op, value(node.left), value(node.right))
        case ast.BoolOp():
            return _choose(isinstance(node.op, ast.And), (value(item) for item in node.values))
        case ast.Compare():
            return _compare(node, value)
        case ast.Subscript(slice=ast.Slice()):
            raise NotPlain("a slice")
        case ast.Subscript():
            return value(node.value)[value(node.slice)]
        case ast.Call(func=ast.Name(id=name)):
            keywords = {keyword.arg: value(keyword.value) for keyword in node.keywords if keyword.arg}
            return FUNCTIONS[name](*map(value, node.args), **keywords)
        case ast.Call(func=ast.Attribute(value=inner, attr=method), keywords=[]):
            base = value(inner)
            if method not in METHODS.get(type(base), ()):
                raise NotPlain(f"the method {method}")
            found = getattr(base, method)(*map(value, node.args))
            return found if isinstance(found, str) else list(found)
    raise NotPlain(f"a {type(node).__name__}")


def _choose(until_false: bool, values: Iterator[Any]) -> Any:
    for value in values:  # noqa: B007 - the last one counts
        if bool(value) != until_false:
            break
    return value


def _compare(node: ast.Compare, value: Callable[[ast.expr], Any]) -> Any:
    left, result = value(node.left), True
    for op, right in zip(node.ops, map(value, node.comparators), strict=True):
        result = _COMPARE[type(op)](left, right)
        if not result:
            break
        left = right
    return result


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if type(op) not in _BINARY:
        raise NotPlain(f"the operator {type(op).__name__}")
    if isinstance(op, ast.Mod) and isinstance(left, (str, bytes)):
        raise NotPlain("formatted text")
    if isinstance(op, ast.Mult):
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, bytes, list, tuple)) and len(items) * times > MAX_ITEMS:
                raise NotPlain(f"more than {MAX_ITEMS} items")
    if isinstance(left, int) and isinstance(right, int) and isinstance(op, (ast.Mult, ast.Pow)):
        bits = left.bit_length() * right if isinstance(op, ast.Pow) else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise NotPlain(f"a number of more than {MAX_BITS} bits")
    return _BINARY[type(op)](left, right)
