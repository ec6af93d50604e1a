"""Tests that are Python text, split into code that runs inside the sandbox and comparisons that run outside.

`assert f(args) == literal` becomes the call `f(args)`, which the program answers, and a comparison with `literal`,
which the program never sees. A test that a program could pass without knowing the literal is refused here with the
reason or, in trust mode, run inside as a whole.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mrl.reward.plain_values import FUNCTIONS, MATH
from mrl.reward.program_queries import Comparison, Expressions, Statement, Step, UnsplittableTest, is_expressible
from mrl.reward.python_text import asserts, bound, bound_in, parse, root_name, shown

MAX_STEPS = 2000
_OF_OTHERS = (ast.Call, ast.Attribute, ast.Subscript, ast.Name)  # their value is that of what they name
Test = tuple[Step, ...]


def split_tests(texts: Sequence[str], *, trust: bool = False) -> list[Test]:
    """Returns the tests of one answer: one a text, where a text without assertion belongs to the next one. Functions
    named test... are called as in pytest.

    `trust`: a test that cannot be split becomes one statement that passes unless it raises; otherwise UnsplittableTest
    is raised. Raises ValueError for text that is not a test.
    """
    splitter, tests, steps = _Statements(), list[Test](), list[Step]()
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
class _Statements(Expressions):
    """Reads statements in order."""

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
