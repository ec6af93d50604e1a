"""Tests that are Python text, split into code that runs inside the sandbox and comparisons that run outside.

`assert f(args) == literal` becomes the call `f(args)`, which the program answers, and a comparison with `literal`,
which the program never sees. A test that a program could pass without knowing the literal is refused here with the
reason or, in trust mode, run inside as a whole.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mrl.reward.plain_values import FUNCTIONS, MATH, TYPES, QueryResult, evaluate, unknown_operator
from mrl.reward.python_text import asserts, bound, bound_in, constant, dotted, parse, root_name, shown

MAX_STEPS = 2000
_OF_OTHERS = (ast.Call, ast.Attribute, ast.Subscript, ast.Name)  # their value is that of what they name
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
Test = tuple[Step, ...]


def split_tests(texts: Sequence[str], *, trust: bool = False) -> list[Test]:
    """Returns the tests of one answer: one a text, where a text without assertion belongs to the next one. Functions
    named test... are called as in pytest.

    `trust`: a test that cannot be split becomes one statement that passes unless it raises; otherwise UnsplittableTest
    is raised. Raises ValueError for text that is not a test.
    """
    splitter, tests, steps = _TestReader(), list[Test](), list[Step]()
    for number, text in enumerate(texts, 1):
        try:
            found, verdict = splitter.text(text, trust)
        except UnsplittableTest as error:
            raise UnsplittableTest(f"test {number}: {error} (see reward.code.unsplit)") from None
        except ValueError as error:
            raise ValueError(f"test {number} {error}") from None
        steps += found
        if verdict:
            tests.append(tuple(steps))
            steps = []
    if uncalled := sorted(splitter.checks.keys() - splitter.called):
        raise UnsplittableTest(
            f"{uncalled[0]} has assertions, but nothing calls it: end the test with {uncalled[0]}(NAME)"
        )
    if steps and trust:
        return [*tests, tuple(steps)]
    if steps or not tests:
        raise UnsplittableTest(f"test {len(texts)}: it has no assertion")
    return tests


@dataclass
class _TestReader:
    """Reads statements and their expressions in order. Names are known only as the tests' own text binds them."""

    known: dict[str, Any] = field(default_factory=dict)  # values whose names were not sent to the program
    sent_names: set[str] = field(default_factory=set)  # names of `known` that were sent to it
    helpers: set[str] = field(default_factory=set)  # bound by the tests to something of their own
    modules: dict[str, str] = field(default_factory=lambda: {"math": "math", "collections": "collections"})
    steps: list[Step] = field(default_factory=list)
    queries: list[str] = field(default_factory=list)
    seen: dict[int, ast.Constant | None] = field(default_factory=dict)  # results of `value` in this statement
    without_value: dict[int, str] = field(default_factory=dict)  # reasons, for the tests' own expressions
    calls_program: bool = False  # names of FUNCTIONS are the program's
    checks: dict[str, ast.FunctionDef] = field(default_factory=dict)  # functions that assert, by their names
    called: set[str] = field(default_factory=set)  # of `checks`

    def text(self, text: str, trust: bool) -> tuple[list[Step], bool]:
        """Returns the steps of the text, and True if they are a test."""
        of_names = ("known", "sent_names", "helpers", "modules", "checks", "called")
        tree, before = parse(text), {name: vars(self)[name].copy() for name in of_names}
        self.steps = []
        try:
            for node in tree.body:
                self.statement(node)
            for name in [name for name in self.checks if name not in self.called and name.startswith("test")]:
                self.inline(self.checks[name], ast.Call(ast.Name(name, ast.Load()), [], []))
            return self.steps, any(isinstance(step, Comparison) for step in self.steps)
        except RecursionError:
            if not trust:
                raise UnsplittableTest("is nested too deeply") from None
        except UnsplittableTest:
            if not trust:
                raise
        vars(self).update(before, steps=[], calls_program=False)
        for name in sorted(self.known):  # definitions of everything that the text may mention, then the text
            self.send_name(name)
        self.steps += [Statement(ast.unparse(node)) for node in self.checks.values()]
        self.called.update(self.checks)
        self.helpers.update(bound_in(tree))
        return [*self.steps, Statement(text)], True

    def statement(self, node: ast.stmt) -> None:
        self.seen.clear()
        self.without_value.clear()
        if len(self.steps) > MAX_STEPS:
            raise UnsplittableTest(f"more than {MAX_STEPS} statements")
        match node:
            case ast.Assert():
                self.check(node.test)
            case ast.Pass() | ast.Expr(value=ast.Constant()):
                pass
            case ast.Import() | ast.ImportFrom():
                self.imports(node)
            case ast.FunctionDef() if asserts(node):
                self.checks[node.name] = node
            case ast.FunctionDef() | ast.ClassDef():
                self.run(node)
                self.helpers.add(node.name)
            case ast.Assign(targets=[target]):
                self.bind(target, node.value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.bind(target, value)
            case ast.Expr(value=ast.Call(func=ast.Name(id=name)) as call) if name in self.checks:
                self.inline(self.checks[name], call)
            case ast.Expr(value=ast.Call()):
                self.run(node)
            case ast.AugAssign() | ast.Delete() | ast.Assign():
                self.run(node)
                self.helpers.update(bound_in(node))
            case ast.For(orelse=[]):
                self.loop(node)
            case _:
                raise UnsplittableTest(
                    f"{shown(node)} is a {type(node).__name__.lower()} statement, which is not supported"
                )

    def imports(self, node: ast.Import | ast.ImportFrom) -> None:
        self.run(node)
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = alias.asname or alias.name
            if module != "solution.":
                self.helpers.add(name.split(".")[0])
            if f"{module}{alias.name}" in (*FUNCTIONS, *MATH, "math", "collections"):
                self.modules[name] = f"{module}{alias.name}"

    def run(self, node: ast.stmt) -> None:
        if asserts(node):
            raise UnsplittableTest(f"{shown(node)} has an assertion that the program could bypass")
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self.refuse_comparisons(node)
        self.send_names(node)
        for inner in [node] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else ast.walk(node):
            for name in bound(inner):
                self.known.pop(name, None)
                self.modules.pop(name, None)
        self.steps.append(Statement(ast.unparse(node)))

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        """Binds a target. The program learns a plain value only if it is asked for an expression of the target."""
        self.seen.clear()
        self.without_value.clear()
        found = self.value(value)
        if isinstance(target, ast.Name) and found is not None and is_expressible(found.value):
            self.assign(target, found.value)
            return
        self.run(ast.fix_missing_locations(ast.Assign([target], value, lineno=1)))
        own = not isinstance(value, _OF_OTHERS) or self.is_helper(root_name(value))
        for name in bound_in(target):
            (self.helpers.add if own else self.helpers.discard)(name)

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.known[target.id] = value
            self.modules.pop(target.id, None)
            self.sent_names.discard(target.id)
            self.helpers.discard(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (tuple, list)):
            if len(target.elts) != len(value):
                raise UnsplittableTest(f"{len(value)} values for {shown(target)}")
            for inner, item in zip(target.elts, value, strict=True):
                self.assign(inner, item)
        else:
            raise UnsplittableTest(f"{shown(target)} is bound in a loop")

    def loop(self, node: ast.For) -> None:
        found = self.value(node.iter)
        if (
            found is None
            or not isinstance(found.value, (list, tuple, set, dict, str, range))
            or not is_expressible(found.value)
        ):
            raise UnsplittableTest(f"{shown(node)} iterates over something that is not a plain value")
        for item in found.value:
            self.assign(node.target, item)
            for inner in node.body:
                self.statement(inner)

    def inline(self, function: ast.FunctionDef, call: ast.Call) -> None:
        arguments, parameters = function.args, [argument.arg for argument in function.args.args]
        others = (arguments.vararg, arguments.kwarg, *arguments.kwonlyargs, *arguments.posonlyargs, *call.keywords)
        if any(others) or len(call.args) != len(parameters):
            raise UnsplittableTest(
                f"{shown(call)} must have the {len(parameters)} positional arguments of its definition"
            )
        self.called.add(function.name)
        for name, value in zip(parameters, call.args, strict=True):
            self.bind(ast.Name(name, ast.Store()), value)
        for node in function.body:
            self.statement(node)

    # expressions

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
        queries, steps, sent_names, plain = self.queries, list(self.steps), set(self.sent_names), None
        self.queries = []
        try:
            found = self.outside(node, True)
            plain = found if not self.queries and isinstance(found, ast.Constant) else None
        except UnsplittableTest as error:
            if isinstance(error, NoValue):
                self.without_value[id(node)] = str(error)
        if plain is None:
            self.steps, self.sent_names = steps, sent_names
        self.queries = queries
        self.seen[id(node)] = plain
        return plain

    def outside(self, node: ast.expr, compared: bool) -> ast.expr:
        """Returns the expression with its calls of the program claimed. compared: with a value hard to guess."""
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
        """Returns a call of a function that is known outside, with its arguments split."""
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
        """Adds a query for this value. Raises UnsplittableTest if the program could answer so that it decides."""
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
