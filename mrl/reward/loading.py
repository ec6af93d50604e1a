"""Loading of reward functions by name, with errors that a user can act on. No torch here: workers start quickly."""

from __future__ import annotations

import importlib
import io
import numbers
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from mrl import user_functions
from mrl.config import reasoning_tasks
from mrl.config.builtin_rewards import BUILTIN_REWARDS, COMPARISONS, OF_AGENTS, OF_TASKS, RESERVED, SHAPES
from mrl.reward.errors import RewardError
from mrl.reward.extract import visible_text
from mrl.reward.score_requests import Outcome, ScoreRequest

if TYPE_CHECKING:
    from PIL import Image

RewardFunction = Callable[[ScoreRequest], Any]
_LARGEST = 3.4028234e38  # in float32, the dtype of all training inputs
Settings = Mapping[str, Mapping[str, Any]]  # settings of built-ins that have a section, by name


def load(
    spec: str,
    answer_key: str = "answer",
    where: str = "function",
    settings: Settings = MappingProxyType({}),
    *,
    pictures: bool = False,
) -> RewardFunction:
    """Returns the function that `spec`, the value of reward.`where`, names, as a function of a ScoreRequest: a built-in
    or `path/to/file.py:name`.

    A user's function gets (prompt, response, row), and with `pictures` a list of PIL images. Raises RewardError, which
    says what is missing and suggests similar names.
    """
    if ":" not in spec:
        return _load_builtin(spec, answer_key, f"reward.{where} {spec!r}", settings)
    words = "(prompt, response, row, pictures)" if pictures else "(prompt, response, row)"
    function = load_file(spec, f"reward.{where}", ("prompt", "response", {}, *([[]] if pictures else [])), words)
    return lambda call: function(call.prompt, call.response, call.row, *([_opened(call)] if pictures else []))


def load_batch(spec: str, where: str, *, pictures: bool = False) -> Callable[[Sequence[ScoreRequest]], Any]:
    """Returns a user's function of lists of equal length: prompts, responses, rows and, with `pictures`, images."""
    words = "(prompts, responses, rows, pictures)" if pictures else "(prompts, responses, rows)"
    function = load_file(spec, f"reward.{where}", ([],) * (3 + pictures), words)

    def score(calls: Sequence[ScoreRequest]) -> Any:
        lists: list[list[Any]] = [[c.prompt for c in calls], [c.response for c in calls], [c.row for c in calls]]
        return function(*lists, *([[_opened(c) for c in calls]] if pictures else []))

    return score


def _opened(call: ScoreRequest) -> list[Image.Image]:
    """Opens the images, which mrl itself has written."""
    from PIL import Image

    return [Image.open(io.BytesIO(png), formats=("PNG",)) for png in call.pictures or ()]


def load_file(spec: str, key: str, arguments: tuple[Any, ...], signature: str) -> Callable[..., Any]:
    """Returns the function `path/to/file.py:name`, the value of `key`, as `mrl.user_functions`. Raises RewardError."""
    try:
        return user_functions.load(spec, key, arguments, signature)
    except user_functions.FunctionError as error:
        raise RewardError(str(error)) from error


def _load_builtin(spec: str, answer_key: str, where: str, settings: Settings) -> RewardFunction:
    if spec in SHAPES:
        shape = vars(importlib.import_module(SHAPES[spec]))[spec]
        return lambda call: shape(call.response, call.response_tokens, **settings[spec])
    if spec in OF_AGENTS:
        return lambda call: _of_environment(call.row)
    if spec in OF_TASKS:
        return lambda call: reasoning_tasks.score(visible_text(call.response).strip(), call.row)
    if spec == "code":
        from mrl.reward.code_tests import make

        reward = make(**settings[spec])
        return lambda call: reward(call.response, _answer(call.row, answer_key))
    if spec in COMPARISONS:
        compare = vars(importlib.import_module(COMPARISONS[spec]))[spec]
        return lambda call: compare(call.response, _plain_answer(call.row, answer_key))
    known = f"{', '.join(sorted(BUILTIN_REWARDS))}, or path/to/file.py:name"
    raise RewardError(f"{where} is not a built-in{user_functions.near(spec, BUILTIN_REWARDS)}; known: {known}")


def _of_environment(row: Mapping[str, Any]) -> Any:
    if "environment" not in row:
        raise ValueError("the response is not from an agent, so no environment has scored it")
    if "score" not in row["environment"]:
        raise ValueError(
            "the environment gave no score: agent.rollout ended without any reward and returned none. Return a score, "
            "or give a reward in at least one step; or set reward.function to a function that scores the conversation"
        )
    return row["environment"]


def answer_problem(
    spec: str, row: Mapping[str, Any], key: str, unsplit: Literal["refuse", "trust"] = "refuse"
) -> str | None:
    """Returns why the built-in `spec` could not score a response to this row; None if it could."""
    try:
        if spec == "code":
            from mrl.reward.code_tests import check_answer

            check_answer(_answer(row, key), unsplit)
        elif spec in OF_TASKS:
            return reasoning_tasks.row_problem(row)
        elif spec in COMPARISONS:
            vars(importlib.import_module(COMPARISONS[spec]))[spec]("", _plain_answer(row, key))
    except (ValueError, KeyError) as error:
        return f"{error.args[0]}, which the built-in {spec} needs" if isinstance(error, KeyError) else str(error)
    return None


def _answer(row: Mapping[str, Any], key: str) -> Any:
    if row.get(key) is None:
        raise KeyError(f"the row has no {key!r} (data.answer_key){user_functions.near(key, map(str, row))}")
    return row[key]


def _plain_answer(row: Mapping[str, Any], key: str) -> str:
    answer = _answer(row, key)
    if not isinstance(answer, str | numbers.Real):
        raise ValueError(f"{key!r} (data.answer_key) must be text or a number, not {type(answer).__name__}")
    return str(answer)


def check_result(result: object) -> Outcome:
    """Returns the outcome of a function's result for one sample. Raises ValueError or TypeError for a wrong one."""
    if not isinstance(result, dict):
        return Outcome(_number("the score", result))
    if "score" not in result:
        raise ValueError(f"returned a dict without 'score', only {sorted(map(str, result))}")
    parts = {str(key): _number(f"{key!r}", value) for key, value in result.items()}
    if hiding := sorted(parts.keys() & set(RESERVED)):
        raise ValueError(f"a part named {hiding[0]!r} would hide the metric of that name: rename it")
    return Outcome(parts.pop("score"), parts)


def check_results(results: object, count: int) -> list[Any]:
    """Returns a batch function's `count` results, each still to be checked. Raises TypeError or ValueError."""
    if isinstance(results, (str, bytes, dict)) or not hasattr(results, "__len__") or not hasattr(results, "__iter__"):
        raise TypeError(f"must return a list of {count} scores, got {type(results).__name__} {str(results)[:80]!r}")
    if len(results) != count:
        raise ValueError(f"returned {len(results)} scores for {count} samples")
    return list(results)


def _number(what: str, value: object) -> float:
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        value = bool(value)  # not a number to `numbers`, as Python's own is
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a float, got {type(value).__name__} {str(value)[:80]!r}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{what} does not fit into a float") from None
    if not isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    if abs(number) > _LARGEST:
        raise ValueError(f"{what} must fit into float32, got {number}")
    return number
