"""docs/api.md names all public objects."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import mrl
import mrl.api
from mrl.api import trainers

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/api.md").read_text()
PUBLIC = {module: [name for name in module.__all__ if name[0] != "_"] for module in (mrl, mrl.api)}


def test_every_public_name_and_method_is_on_the_page() -> None:
    classes = [getattr(module, name) for module, names in PUBLIC.items() for name in names]
    methods = {name for each in classes for name, value in vars(each).items() if inspect.isfunction(value)}
    names = {name for names in PUBLIC.values() for name in names} | {name for name in methods if name[0] != "_"}
    names -= {"result"}  # the result of fit
    assert not [name for name in names if not re.search(rf"\b{name}\b", PAGE)]


def test_every_public_name_has_a_docstring() -> None:
    classes = [getattr(module, name) for module, names in PUBLIC.items() for name in names] + [trainers.Trainer]
    missing = [each.__name__ for each in classes if not each.__doc__]
    for each in classes:
        found = {name: value for name, value in vars(each).items() if inspect.isfunction(value) and name[0] != "_"}
        missing += [f"{each.__name__}.{name}" for name, value in found.items() if not value.__doc__]
    assert not missing


def test_an_own_loop_is_short() -> None:
    assert len((ROOT / "examples/own_loop.py").read_text().splitlines()) <= 100
