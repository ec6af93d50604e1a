"""Public docstrings say what cannot be read off the signature: shapes of tensors, errors, what is returned.

Looked at are functions, methods and classes without a leading underscore, in modules without one. Of these, one has

- shapes to speak of, if a tensor or array is among its arguments, results or fields; the module's docstring may say
  them once for all that have one of their own
- errors, if it raises one itself (but for NotImplementedError, AssertionError and in a `try`, where it may catch it)
- a result, if it returns something and its body is more than one statement

and one that has none of these is not counted: a docstring would repeat the name. What a base class of mrl says of a
method holds for those that override it. Sections of the configuration have a comment a key instead, which
tests/test_config_manual.py demands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "mrl"
WANTED = 0.85
ARRAYS = re.compile(r"\b(Tensor|ndarray)\b")
SHAPES = re.compile(r"\[[^\]]*\]|\b0-d\b|\bshapes?\b|\bscalars?\b|\blaid out like\b", re.IGNORECASE)
ERRORS = re.compile(r"\b[Rr]aise[sd]?\b|\b[A-Z]\w*Error\b|\brefuse[sd]?\b")
UNDOCUMENTED = ("NotImplementedError", "AssertionError")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Public:
    where: str
    node: Function | ast.ClassDef
    text: str
    of_module: str
    lacks: list[str] = field(default_factory=list)
    has_something_to_say: bool = False

    def needs(self, what: str, is_said: bool) -> None:
        self.has_something_to_say = True
        if not is_said:
            self.lacks.append(what)


def classes() -> dict[str, ast.ClassDef]:
    """All of mrl's by their names; of two with one name the last."""
    trees = (ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py"))
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def said_by_a_base(owner: ast.ClassDef, name: str, known: dict[str, ast.ClassDef]) -> str:
    for base in owner.bases:
        while isinstance(base, ast.Subscript):
            base = base.value
        above = known.get(
            base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
        )
        if above is None or above is owner:
            continue
        for node in above.body:
            if isinstance(node, Function) and node.name == name and (text := ast.get_docstring(node)):
                return text
        if text := said_by_a_base(above, name, known):
            return text
    return ""


def public(body: list[ast.stmt]) -> Iterator[Function | ast.ClassDef]:
    yield from (node for node in body if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"))


def members(file: Path, known: dict[str, ast.ClassDef]) -> Iterator[Public]:
    where, tree = str(file.relative_to(PACKAGE)), ast.parse(file.read_text())
    above = ast.get_docstring(tree) or ""
    for node in public(tree.body):
        yield Public(f"{where}: {node.name}", node, ast.get_docstring(node) or "", above)
        for method in public(node.body) if isinstance(node, ast.ClassDef) else ():
            text = ast.get_docstring(method) or said_by_a_base(node, method.name, known)
            yield Public(f"{where}: {node.name}.{method.name}", method, text, above)


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Without those of functions in it, and of what is tried."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.Try):
            waiting += [inner for handler in node.handlers for inner in handler.body] + node.orelse + node.finalbody
        elif not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))


def raises(function: Function) -> bool:
    for node in own_nodes(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
            if name not in UNDOCUMENTED:
                return True
    return False


def statements(function: Function) -> list[ast.stmt]:
    return function.body[1:] if ast.get_docstring(function) else function.body


def annotations(node: Function | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        fields = (a for a in node.body if isinstance(a, ast.AnnAssign) and not ast.unparse(a.target).startswith("_"))
        return " ".join(ast.unparse(a.annotation) for a in fields)
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    return " ".join(ast.unparse(a) for a in (*(x.annotation for x in arguments), node.returns) if a is not None)


def judged(one: Public) -> Public:
    node, text = one.node, one.text
    if ARRAYS.search(annotations(node)):
        one.needs("shapes", bool(text and SHAPES.search(text + one.of_module)))
    if isinstance(node, ast.ClassDef):
        return one
    if raises(node):
        one.needs("errors", bool(ERRORS.search(text)))
    returned = ast.unparse(node.returns) if node.returns else "None"
    if returned not in ("None", "NoReturn") and len(statements(node)) > 1:
        one.needs("what is returned", bool(text))
    return one


def counted() -> list[Public]:
    known = classes()
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if not (f.stem.startswith("_") and f.stem != "__init__")]
    files = [file for file in files if file.parent != PACKAGE / "config/sections"]
    found = [judged(one) for file in files for one in members(file, known)]
    return [one for one in found if one.has_something_to_say]


def test_public_docstrings_say_shapes_errors_and_results() -> None:
    all_of_them = counted()
    poor = [one for one in all_of_them if one.lacks]
    share = 1 - len(poor) / len(all_of_them)
    listed = "\n".join(f"{one.where}: no {', no '.join(one.lacks)}" for one in poor)
    assert len(all_of_them) > 400 and share >= WANTED, f"{share:.1%} of {len(all_of_them)}\n{listed}"
