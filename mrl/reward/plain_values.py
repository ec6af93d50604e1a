"""Plain values: results that a sandboxed program claims for its calls, and expressions over them, evaluated outside.

A value is None or of exactly bool, int, float, complex, Decimal, Fraction, str, bytes, range, list, tuple, dict, set or
frozenset, or `OpaqueItems` of any other iterable. Text from a program and expressions from a data set are harmless
here: both are bounded in size, and nothing is called except FUNCTIONS and METHODS.
"""

from __future__ import annotations

import ast
import collections
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 100
MAX_OF_HASH = 100  # keys or members with one hash: a set of many would take minutes to make
MAX_ITEMS = 1_000_000  # of an expression's result
MAX_BITS = 1_000_000
MAX_DIGITS, MAX_EXPONENT = 10_000, 1000  # of a Decimal: int() of a larger one would take minutes
MAX_WIDTH = 1000  # of a text that % makes of one value


class NotPlain(ValueError):
    """Not a value or an expression of this module, or too large."""


@dataclass(frozen=True)
class OpaqueItems:
    """Items of a generator or the like: equal only to itself or, for keys and items of a dict, to a set of the same."""

    values: list[Any]
    is_set: bool = False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        return self is other or (self.is_set and isinstance(other, (set, frozenset)) and set(self.values) == other)


@dataclass(frozen=True)
class QueryResult:
    """Placeholder in an expression's Constant for the claim of this number."""

    number: int


def decode(line: bytes) -> list[Any] | None:
    """Returns the values of a line of `answer_calls`; None after an exception. Raises NotPlain for an invalid line."""
    try:
        found = json.loads(line)
        return None if found is None else _decoded_items(found, 0)
    except (ValueError, TypeError, LookupError, RecursionError, ArithmeticError) as error:
        raise NotPlain(str(error)) from None


def _decoded_items(found: Any, depth: int) -> list[Any]:
    if type(found) is not list or depth > MAX_DEPTH:
        raise NotPlain("no list, or too deep")
    return [_decoded(item, depth) for item in found]


def _decoded(found: Any, depth: int) -> Any:
    if found is None or type(found) in (bool, str, int, float):
        return found
    kind, content = found
    if kind in _SCALARS:
        return _SCALARS[kind](content)
    return _CONTAINERS[kind](_decoded_items(content, depth + 1))


def _range(*bounds: int) -> range:
    if len(found := range(*bounds)) > MAX_ITEMS:
        raise NotPlain(f"more than {MAX_ITEMS} items")
    return found


def _decimal(text: str) -> Decimal:
    found = Decimal(text)
    if len(text) > MAX_DIGITS or (found.is_finite() and found and abs(found.adjusted()) > MAX_EXPONENT):
        raise NotPlain(f"a Decimal of more than {MAX_DIGITS} digits or an exponent beyond {MAX_EXPONENT}")
    return found


def _hashed(make: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `make` with limits on the number of items, and of items with one hash."""

    def made(items: Any = (), **named: Any) -> Any:
        keys = list(items)
        if len(keys) > MAX_ITEMS:
            raise NotPlain(f"more than {MAX_ITEMS} members")
        of_hash = collections.Counter(
            hash(key[0] if make is dict and not isinstance(items, dict) else key) for key in keys
        )
        if max(of_hash.values(), default=0) > MAX_OF_HASH and len(set(map(repr, keys))) > MAX_OF_HASH:
            raise NotPlain(f"more than {MAX_OF_HASH} members with one hash")
        return make(items if isinstance(items, dict) else keys, **named)

    return made


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "bytes": bytes.fromhex,
    "range": lambda bounds: _range(*(int(text, 16) for text in bounds)),
    "Decimal": _decimal,
    "Fraction": lambda parts: Fraction(*(int(text, 16) for text in parts)),
}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    **{kind.__name__: _hashed(kind) for kind in (set, frozenset, dict)},
    "items": OpaqueItems,
    "dict_keys": lambda values: OpaqueItems(values, is_set=True),
    "dict_items": lambda values: OpaqueItems(values, is_set=True),
}


TYPES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, all, any, bool, float, int, isinstance, len, list, max, min, round, sorted, str)},
    **{f.__name__: f for f in (sum, tuple, type)},
    **{f.__name__: _hashed(f) for f in (dict, set, frozenset)},
    "range": _range,
    "zip": lambda *lists, strict=False: list(zip(*lists, strict=strict)),
    "enumerate": lambda items, start=0: list(enumerate(items, start)),
    "collections.Counter": _hashed(collections.Counter),
    **{f"math.{f.__name__}": f for f in (math.isclose, math.fabs, math.sqrt, math.isnan, math.isinf, math.floor)},
    "math.ceil": math.ceil,
}
METHODS: dict[type, tuple[str, ...]] = {str: ("split", "strip", "lower", "upper"), dict: ("items", "keys", "values")}
MATH = {f"math.{name}": getattr(math, name) for name in ("pi", "e", "inf", "nan", "tau")}

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.BitXor: operator.xor,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
}  # fmt: skip


def evaluate(node: ast.expr, queries: Sequence[Any] = ()) -> Any:
    """Returns an expression's value, with calls of FUNCTIONS. Raises NotPlain, or any error of Python's operations."""

    def value(node: ast.expr) -> Any:
        return evaluate(node, queries)

    match node:
        case ast.Constant(value=QueryResult(number=number)):
            return queries[number]
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
            for item in node.values:
                result = value(item)
                if bool(result) != isinstance(node.op, ast.And):
                    break
            return result
        case ast.Compare():
            left, result = value(node.left), True
            for op, right in zip(node.ops, map(value, node.comparators), strict=True):
                result = _COMPARE[type(op)](left, right)
                if not result:
                    break
                left = right
            return result
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


def unknown_operator(node: ast.expr) -> str | None:
    """Returns the name of an operator in the expression that `evaluate` does not know; None if it knows all."""
    operators = (inner.op for inner in ast.walk(node) if isinstance(inner, ast.BinOp))
    return next((type(op).__name__ for op in operators if type(op) not in _BINARY), None)


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Mod) and isinstance(left, (str, bytes)):
        text = left if isinstance(left, str) else left.decode("latin-1")
        forms = " ".join(re.findall(r"%[^a-zA-Z%(]*", text)) if "%(" not in text else text
        if "*" in forms or any(len(number) > 4 or int(number) > MAX_WIDTH for number in re.findall(r"\d+", forms)):
            raise NotPlain(f"text formatted to more than {MAX_WIDTH} characters")
    if isinstance(op, ast.Mult):
        for items, times in ((left, right), (right, left)):
            if isinstance(items, (str, bytes, list, tuple)) and len(items) * times > MAX_ITEMS:
                raise NotPlain(f"more than {MAX_ITEMS} items")
    if isinstance(left, (int, Fraction)) and isinstance(right, int):
        bits = max(left.numerator.bit_length(), left.denominator.bit_length())
        grows = {ast.Mult: bits + right.bit_length(), ast.Pow: bits * abs(right), ast.LShift: bits + right}
        if grows.get(type(op), 0) > MAX_BITS:
            raise NotPlain(f"a number of more than {MAX_BITS} bits")
    return _BINARY[type(op)](left, right)
