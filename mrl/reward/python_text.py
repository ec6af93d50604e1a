"""Analysis of Python text: names that a statement binds, and the name that an expression starts from."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from typing import Any

MAX_TEXT = 1_000_000


def parse(text: str) -> ast.Module:
    """Parses Python. Raises ValueError for text that is not Python, or longer than MAX_TEXT characters."""
    if len(text) > MAX_TEXT:
        raise ValueError(f"is longer than {MAX_TEXT} characters")
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"is not Python: {error}") from None


def asserts(node: ast.AST) -> bool:
    """Returns True if there is an assertion anywhere in the node."""
    return any(isinstance(inner, ast.Assert) for inner in ast.walk(node))


def bound(node: ast.AST) -> Iterator[str]:
    """Yields names that this node itself, without nested nodes, binds or deletes."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield node.id
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)


def bound_in(target: ast.AST) -> Iterator[str]:
    """Yields names that the node and all nested nodes bind or delete."""
    for node in ast.walk(target):
        yield from bound(node)


def asked_names(texts: Iterable[str]) -> set[str]:
    """Returns names that tests use and neither bind nor get from Python; text that is not Python has none."""
    used: set[str] = set()
    own: set[str] = set()
    for text in texts:
        try:
            tree = parse(text)
        except ValueError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "solution":
                used.update(alias.name for alias in node.names)
                continue
            own.update(bound(node))
            if isinstance(node, ast.arg):
                own.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not hasattr(builtins, node.id):
                used.add(node.id)
    return used - own


def root_name(node: ast.expr) -> str | None:
    """Returns the name that the expression starts from; None if it does not start from a name."""
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def dotted(node: ast.expr, modules: dict[str, str]) -> str:
    """Returns a name as in "math.isclose", independent of the form of its import; "" if it is not a name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{modules.get(node.value.id, '')}.{node.attr}"
    return modules.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def constant(value: Any) -> ast.Constant:
    """Returns a Constant of any value, not only of a literal."""
    return ast.Constant(value)


def shown(node: ast.AST) -> str:
    """Returns the node's text, on one line and in quotes, cut at 80 characters."""
    text = " ".join(ast.unparse(node).split())
    return repr(text if len(text) <= 80 else f"{text[:80]} ...")
