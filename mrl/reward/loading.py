"""From `reward.function` to a callable, with the errors a user can act on. No torch here: workers start quickly."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import numbers
import sys
import traceback
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import Any

from mrl.reward.errors import RewardError

RewardFunction = Callable[[str, str, dict[str, Any]], Any]

BUILTINS = {
    "exact_match": "mrl.reward.functions",
    "sorted_digits": "mrl.reward.functions",
    "arithmetic": "mrl.reward.functions",
    "math": "mrl.reward.math_answer",
}


def load(spec: str, answer_key: str = "answer") -> RewardFunction:
    """The function f(prompt, response, row) that `spec` names: a built-in or `path/to/file.py:name`.

    Built-ins compare with `str(row[answer_key])`. A file's folder is put on sys.path, so that it can import its
    neighbours. Raises RewardError that says what is missing and what comes near.
    """
    if ":" not in spec:
        return _load_builtin(spec, answer_key)
    path_text, _, name = spec.rpartition(":")
    where = f"reward.function {spec!r}"
    path = Path(path_text).expanduser()
    if not path.is_file():
        near = _near(path.name, (p.name for p in path.parent.glob("*.py"))) if path.parent.is_dir() else ""
        raise RewardError(f"{where}: there is no file {path.absolute()}{near}")
    module = _import_file(path.absolute(), where)
    function = getattr(module, name, None)
    if function is None:
        near = _near(name, (key for key, value in vars(module).items() if callable(value) and key[0] != "_"))
        raise RewardError(f"{where}: {path} defines no {name!r}{near}")
    _check_signature(function, where)
    checked: RewardFunction = function
    return checked


def _load_builtin(spec: str, answer_key: str) -> RewardFunction:
    if spec not in BUILTINS:
        raise RewardError(
            f"reward.function {spec!r} is no built-in{_near(spec, BUILTINS)}; "
            f"known: {', '.join(sorted(BUILTINS))}, or path/to/file.py:name"
        )
    compare = vars(importlib.import_module(BUILTINS[spec]))[spec]

    def against_answer(prompt: str, response: str, row: dict[str, Any]) -> Any:
        if answer_key not in row:
            raise KeyError(f"the row has no {answer_key!r} (data.answer_key){_near(answer_key, map(str, row))}")
        return compare(response, str(row[answer_key]))

    return against_answer


def _near(name: str, candidates: Iterable[str]) -> str:
    names = sorted(candidates)
    near = difflib.get_close_matches(name, names, n=3)
    if near:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    return f"; there is {', '.join(map(repr, names[:10]))}" if names else ""


def _import_file(path: Path, where: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_function_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{where}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{where}: importing {path} failed:\n{traceback.format_exc()}") from error
    return module


def _check_signature(function: object, where: str) -> None:
    if not callable(function):
        raise RewardError(f"{where} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"{where} is an async function; write a plain one")
    try:
        inspect.signature(function).bind("prompt", "response", {})
    except TypeError as error:
        raise RewardError(f"{where} must take (prompt, response, row): {error}") from error
    except ValueError:
        return  # a C function that does not tell its signature


def check_result(result: object) -> tuple[float, dict[str, float]]:
    """(score, the other parts) of what a reward function returned; ValueError or TypeError that says what is wrong."""
    if not isinstance(result, dict):
        return _number("the score", result), {}
    if "score" not in result:
        raise ValueError(f"returned a dict without 'score', only {sorted(map(str, result))}")
    parts = {str(key): _number(f"{key!r}", value) for key, value in result.items()}
    return parts.pop("score"), parts


def _number(what: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a float, got {type(value).__name__} {str(value)[:80]!r}")
    number = float(value)
    if not isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    return number
