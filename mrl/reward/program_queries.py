"""Expressions of tests, split into queries to the program inside and comparisons outside."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field
from typing import Any

from mrl.reward.plain_values import FUNCTIONS, MATH, TYPES, QueryResult, evaluate, unknown_operator
from mrl.reward.python_text import bound_in, constant, dotted, root_name, shown

_UNCHANGING = (type(None), bool, int, float, complex, str, bytes, range)
_TELLING = ("startswith", "endswith", "issubset", "issuperset", "isdisjoint", "equals")  # f(x).startswith(expected)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp)


class UnsplittableTest(ValueError):
    """A test whose verdict the program would decide; the message says why."""


class NoValue(UnsplittableTest):
    """An expression of the tests alone that cannot be evaluated, or is too large."""


@dataclass(frozen=True)
class Statement:
    """A statement to run inside; the test fails if it raises."""

    source: str


@dataclass(frozen=True)
class Comparison:
    """Expressions to evaluate inside, and the condition on their values to check outside."""

    queries: tuple[str, ...]
    expression: ast.expr


Step = Statement | Comparison


@dataclass
class Expressions:
    """Reads expressions in order. Names are known only as the tests' own text binds them."""

    known: dict[str, Any] = field(default_factory=dict)  # values whose names were not sent to the program
    sent_names: set[str] = field(default_factory=set)  # names of `known` that were sent to it
    helpers: set[str] = field(default_factory=set)  # bound by the tests to something of their own
    modules: dict[str, str] = field(default_factory=lambda: {"math": "math", "collections": "collections"})
    steps: list[Step] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    seen: dict[int, ast.Constant | None] = field(default_factory=dict)  # results of `value` in this statement
    without_value: dict[int, str] = field(default_factory=dict)  # reasons, for the tests' own expressions
    calls_program: bool = False  # names of FUNCTIONS are the program's

    def check(self, node: ast.expr) -> None:
        """Adds the steps of an assertion: queries to the program, and the condition on their values. Raises
        UnsplittableTest for an assertion that cannot be split, or can never hold.
        """
        names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)} - self.known.keys()
        # assert sum(10, 15) == 6: the program defines its own sum
        self.calls_program = not self.helpers & names and all(hasattr(builtins, name) for name in names)
        self.queries = []
        checked = self.outside(node, False)
        if self.queries:
            if (unknown := unknown_operator(checked)) is not None:
                raise UnsplittableTest(
                    f"{shown(node)} uses the operator {unknown}, which is not evaluated outside the sandbox"
                )
            self.steps.append(Comparison(tuple(self.queries), checked))
        elif not self.folded(checked).value:
            raise UnsplittableTest(f"{shown(node)} can never be true")
        self.calls_program = False

    def value(self, node: ast.expr) -> ast.Constant | None:
        """Returns the expression's value as a constant if the program has no part in it, else None."""
        if id(node) in self.seen:
            return self.seen[id(node)]
        queries, steps, sent_names = self.queries, list(self.steps), set(self.sent_names)
        self.queries = []
        try:
            found = self.outside(node, True)
            plain = found if not self.queries and isinstance(found, ast.Constant) else None
        except NoValue as error:
            plain = None
            self.without_value[id(node)] = str(error)
        except UnsplittableTest:
            plain = None
        if plain is None:
            self.steps, self.sent_names = steps, sent_names
        self.queries = queries
        self.seen[id(node)] = plain
        return plain

    def outside(self, node: ast.expr, compared: bool) -> ast.expr:
        """Returns the expression with its calls of the program claimed. `compared`: with a value that is hard to
        guess.
        """
        before = len(self.queries)
        found = self.parts(node, compared)
        return found if len(self.queries) > before or isinstance(found, ast.Constant) else self.folded(found)

    def folded(self, node: ast.expr) -> ast.Constant:
        """Returns the value of an expression without claims, as a constant. Raises UnsplittableTest if it has none."""
        if isinstance(node, ast.Constant):
            return node
        try:
            return constant(evaluate(node))
        except Exception as error:
            raise NoValue(f"{shown(node)} has no plain value: {error or type(error).__name__}") from None

    def parts(self, node: ast.expr, compared: bool) -> ast.expr:
        """Returns the expression as it is evaluated outside: known values, and claims that the program answers."""
        match node:
            case ast.Constant():
                return node
            case ast.Name(id=name) if name in self.known and not self.may_have_changed(name):
                return constant(self.known[name])
            case ast.Name(id=name) if name in TYPES and name not in self.helpers and not self.calls_program:
                return constant(TYPES[name])
            case ast.List(elts=elts) | ast.Tuple(elts=elts) | ast.Set(elts=elts):
                return type(node)([self.outside(item, compared) for item in elts])
            case ast.Dict(keys=keys) if None not in keys:
                items = (*filter(None, keys), *node.values)
                outside = [self.outside(item, compared) for item in items]
                return ast.Dict(list(outside[: len(keys)]), outside[len(keys) :])
            case ast.UnaryOp(op=op):
                return ast.UnaryOp(op, self.outside(node.operand, compared and not isinstance(op, ast.Not)))
            case ast.BinOp(op=op):
                sides = self.sides([node.left, node.right], compared)
                return ast.BinOp(sides[0], op, sides[1])
            case ast.BoolOp(op=op):
                return ast.BoolOp(op, [self.outside(value, False) for value in node.values])
            case ast.Compare():
                sides = self.sides([node.left, *node.comparators], None)
                return ast.Compare(sides[0], node.ops, sides[1:])
            case ast.Call() if self.function(node) is not None:
                return self.call(node, compared)
            case ast.Attribute() | ast.Name() if dotted(node, self.modules) in MATH:
                return constant(MATH[dotted(node, self.modules)])
            case ast.Subscript(value=inner) | ast.Call(func=ast.Attribute(value=inner)) if self.value(inner):
                return self.of_plain(node, compared)
        return self.query(node, compared)

    def sides(self, nodes: list[ast.expr], compared: bool | None) -> list[ast.expr]:
        """Returns the operands. Raises UnsplittableTest if the program answers two adjacent operands: it could make
        them equal.

        `compared` None: operands are compared with each other; a truth value or None is easy to guess.
        """
        plain = [self.value(node) for node in nodes]
        for one, other, node, after in zip(plain, plain[1:], nodes, nodes[1:], strict=False):
            if one is None and other is None:
                for side in (node, after):
                    if id(side) in self.without_value:
                        raise NoValue(self.without_value[id(side)])
                raise UnsplittableTest(f"{shown(node)} is combined with another value that comes from the program too")
        if compared is None:
            compared = any(side is not None and type(side.value) not in (bool, type(None)) for side in plain)
        return [side or self.outside(node, compared) for side, node in zip(plain, nodes, strict=True)]

    def function(self, node: ast.Call) -> str | None:
        """Returns the function's name in FUNCTIONS; None if it is not there."""
        name = dotted(node.func, self.modules)
        taken = name in self.helpers or name in self.known or (self.calls_program and "." not in name)
        return name if name in FUNCTIONS and not taken else None

    def call(self, node: ast.Call, compared: bool) -> ast.expr:
        """Returns the call of a function that is known outside, with its arguments split. Raises UnsplittableTest for a
        call that is not plain.
        """
        name = self.function(node) or ""
        keywords = [self.value(keyword.value) for keyword in node.keywords if keyword.arg]
        if len(keywords) != len(node.keywords) or not all(keywords):
            raise UnsplittableTest(f"{shown(node)} has keyword arguments that are not plain values")
        if name == "isinstance" and node.args and self.value(node.args[-1]) is None:
            raise UnsplittableTest(f"{shown(node)} checks for a type that is not plain")
        if name == "math.isclose":
            arguments = self.sides(node.args, None)
        else:
            arguments = [self.outside(argument, compared) for argument in node.args]
        plain = [ast.keyword(k.arg, value or k.value) for k, value in zip(node.keywords, keywords, strict=True)]
        return ast.Call(ast.Name(name, ast.Load()), arguments, plain)

    def of_plain(self, node: ast.Subscript | ast.Call, compared: bool) -> ast.expr:
        """Returns an item or method call of a plain value."""
        if isinstance(node, ast.Subscript):
            return ast.Subscript(self.outside(node.value, True), self.outside(node.slice, compared), ast.Load())
        assert isinstance(node.func, ast.Attribute)
        arguments = [self.value(argument) for argument in node.args]
        if not all(arguments) or node.keywords:
            return self.query(node, compared)
        base = self.outside(node.func.value, True)
        return ast.Call(ast.Attribute(base, node.func.attr, ast.Load()), [a for a in arguments if a], [])

    def query(self, node: ast.expr, compared: bool) -> ast.Constant:
        """Adds a query for this expression's value. Raises UnsplittableTest if the program could answer with a value
        that decides the test.
        """
        if not isinstance(node, (ast.Call, ast.Attribute, ast.Subscript, ast.Name, *_COMPREHENSIONS)):
            raise UnsplittableTest(f"{shown(node)} is a {type(node).__name__}")
        asked = node.elt if isinstance(node, _COMPREHENSIONS) else node
        root = root_name(asked)
        tells = isinstance(asked, ast.Call) and isinstance(asked.func, ast.Attribute) and asked.func.attr in _TELLING
        decides = isinstance(node, _COMPREHENSIONS) and not isinstance(asked, (ast.Call, ast.Attribute, ast.Subscript))
        if decides or (not compared and (tells or self.is_helper(root))):
            raise UnsplittableTest(f"{shown(node)} is evaluated inside the sandbox, where the program could replace it")
        if isinstance(node, ast.Name) and self.is_builtin(node.id):
            raise UnsplittableTest(f"{node.id} is not a plain value")
        self.refuse_comparisons(node)
        self.send_names(node)
        self.queries.append(ast.unparse(node))
        return constant(QueryResult(len(self.queries) - 1))

    def refuse_comparisons(self, node: ast.AST) -> None:
        """Raises UnsplittableTest for comparisons of the program's objects inside: they may be equal to everything."""
        own = {name for name in self.known if not self.may_have_changed(name)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.comprehension) and self.value(inner.iter) is not None:
                own.update(bound_in(inner.target))
            elif isinstance(inner, ast.Lambda):
                own.update(argument.arg for argument in inner.args.args)
        for inner in ast.walk(node):
            names = {name.id for name in ast.walk(inner) if isinstance(name, ast.Name)} - own
            if isinstance(inner, ast.Compare) and not all(map(self.is_helper, names)):
                raise UnsplittableTest(
                    f"{shown(inner)} compares inside the sandbox, where the program's objects may equal all"
                )

    # names

    def is_helper(self, name: str | None) -> bool:
        """Returns True if the name is bound by the tests, and not by the program."""
        return name is None or name in ("eval", "exec") or name in self.helpers or self.is_builtin(name)

    def is_builtin(self, name: str) -> bool:
        return hasattr(builtins, name) and name not in self.known and not self.calls_program

    def may_have_changed(self, name: str) -> bool:
        return name in self.sent_names and not is_immutable(self.known[name])

    def send_names(self, node: ast.AST) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in self.known:
                self.send_name(inner.id)

    def send_name(self, name: str) -> None:
        if name not in self.sent_names:
            self.sent_names.add(name)
            self.steps.append(Statement(f"{name} = (lambda inf, nan: {self.known[name]!r})(1e999, 1e999 - 1e999)"))


def is_immutable(value: Any) -> bool:
    """Returns True if the value is immutable, including its contents."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_immutable, value))
    return isinstance(value, _UNCHANGING)


def is_expressible(value: Any) -> bool:
    """Returns True if the program can be told the value as text."""
    if isinstance(value, dict):
        return type(value) is dict and all(map(is_expressible, (*value, *value.values())))
    if type(value) in (list, tuple, set, frozenset):
        return all(map(is_expressible, value))
    return type(value) in _UNCHANGING
