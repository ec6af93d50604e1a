"""From a function's name to a callable, with the errors a user can act on. No torch here: workers start quickly."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import numbers
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal

from mrl.config.builtin_rewards import BUILTIN_REWARDS, COMPARISONS, RESERVED, SHAPES
from mrl.reward.calls import Call, Outcome
from mrl.reward.errors import RewardError

RewardFunction = Callable[[Call], Any]
Settings = Mapping[str, Mapping[str, Any]]  # of the built-ins that have a section, by their names


def load(
    spec: str, answer_key: str = "answer", where: str = "function", settings: Settings = MappingProxyType({})
) -> RewardFunction:
    """What `spec`, the value of reward.`where`, names: a built-in or `path/to/file.py:name`, as a function of a Call.

    A user's function gets (prompt, response, row). Raises RewardError that says what is missing and what comes near.
    """
    if ":" not in spec:
        return _load_builtin(spec, answer_key, f"reward.{where} {spec!r}", settings)
    function = load_file(spec, where, ("prompt", "response", {}), "(prompt, response, row)")
    return lambda call: function(call.prompt, call.response, call.row)


def load_batch(spec: str, where: str = "function") -> Callable[[Sequence[Call]], Any]:
    """The same for a user's function of (prompts, responses, rows), three lists of one length."""
    function = load_file(spec, where, ([], [], []), "(prompts, responses, rows)")
    return lambda calls: function([c.prompt for c in calls], [c.response for c in calls], [c.row for c in calls])


def load_file(spec: str, where: str, arguments: tuple[Any, ...], signature: str) -> Callable[..., Any]:
    """The function of `path/to/file.py:name`, which must take `arguments`. Raises RewardError if there is no such one.

    The file's folder is put on sys.path, so that it can import its neighbours.
    """
    path_text, _, name = spec.rpartition(":")
    where = f"reward.{where} {spec!r}"
    path = Path(path_text).expanduser()
    if not path.is_file():
        near = _near(path.name, (p.name for p in path.parent.glob("*.py"))) if path.parent.is_dir() else ""
        raise RewardError(f"{where}: there is no file {path.absolute()}{near}")
    module = _import_file(path.absolute(), where)
    function = getattr(module, name, None)
    if function is None:
        near = _near(name, (key for key, value in vars(module).items() if callable(value) and key[0] != "_"))
        raise RewardError(f"{where}: {path} defines no {name!r}{near}")
    _check_signature(function, where, arguments, signature)
    checked: Callable[..., Any] = function
    return checked


def _load_builtin(spec: str, answer_key: str, where: str, settings: Settings) -> RewardFunction:
    if spec in SHAPES:
        shape = vars(importlib.import_module(SHAPES[spec]))[spec]
        return lambda call: shape(call.response, call.response_tokens, **settings[spec])
    if spec == "code":
        from mrl.reward.code_tests import make

        reward = make(**settings[spec])
        return lambda call: reward(call.response, _answer(call.row, answer_key))
    if spec in COMPARISONS:
        compare = vars(importlib.import_module(COMPARISONS[spec]))[spec]
        return lambda call: compare(call.response, _plain_answer(call.row, answer_key))
    known = f"{', '.join(sorted(BUILTIN_REWARDS))}, or path/to/file.py:name"
    raise RewardError(f"{where} is no built-in{_near(spec, BUILTIN_REWARDS)}; known: {known}")


def answer_problem(
    spec: str, row: Mapping[str, Any], key: str, unsplit: Literal["refuse", "trust"] = "refuse"
) -> str | None:
    """Why the built-in `spec` could not score a response to this row; None if it can, or needs no answer.

    `unsplit` is reward.code's. Whether `math` can read an answer only shows when it does.
    """
    try:
        if spec == "code":
            from mrl.reward.code_tests import check_answer

            check_answer(_answer(row, key), unsplit)
        elif spec in COMPARISONS:
            answer = _plain_answer(row, key)
            if spec != "math":
                vars(importlib.import_module(COMPARISONS[spec]))[spec]("", answer)
    except (ValueError, KeyError) as error:
        return f"{error.args[0]}, which the built-in {spec} needs" if isinstance(error, KeyError) else str(error)
    return None


def _answer(row: Mapping[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise KeyError(f"the row has no {key!r} (data.answer_key){_near(key, map(str, row))}")
    return row[key]


def _plain_answer(row: Mapping[str, Any], key: str) -> str:
    answer = _answer(row, key)
    if not isinstance(answer, str | numbers.Real):
        raise ValueError(f"{key!r} (data.answer_key) must be text or a number, not {type(answer).__name__}")
    return str(answer)


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
        raise RewardError(f"{where}: importing {path} failed: {_import_error(error, path)}") from error
    return module


def _import_error(error: BaseException, path: Path) -> str:
    """The error, and the line of the file itself that led to it."""
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{what} (line {line})" if line is not None else what


def _check_signature(function: object, where: str, arguments: tuple[Any, ...], signature: str) -> None:
    if not callable(function):
        raise RewardError(f"{where} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise RewardError(f"{where} is an async function (async def), which nothing here awaits: write a plain one")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise RewardError(f"{where} must take {signature}: {error}") from error
    except ValueError:
        return  # a C function that does not tell its signature


def check_result(result: object) -> Outcome:
    """What a reward function returned for one sample; ValueError or TypeError that says what is wrong with it."""
    if not isinstance(result, dict):
        return Outcome(_number("the score", result))
    if "score" not in result:
        raise ValueError(f"returned a dict without 'score', only {sorted(map(str, result))}")
    parts = {str(key): _number(f"{key!r}", value) for key, value in result.items()}
    if hiding := sorted(parts.keys() & set(RESERVED)):
        raise ValueError(f"a part named {hiding[0]!r} would hide the metric of that name")
    return Outcome(parts.pop("score"), parts)


def check_results(results: object, count: int) -> list[Any]:
    """What a batch function returned, one item a sample (each still to be checked). Raises TypeError or ValueError if
    it is no list of `count` items."""
    if isinstance(results, (str, bytes, dict)) or not hasattr(results, "__len__") or not hasattr(results, "__iter__"):
        raise TypeError(f"must return a list of {count} scores, got {type(results).__name__} {str(results)[:80]!r}")
    if len(results) != count:
        raise ValueError(f"returned {len(results)} scores for {count} samples")
    return list(results)


def _number(what: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a float, got {type(value).__name__} {str(value)[:80]!r}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{what} does not fit into a float") from None
    if not isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    return number
