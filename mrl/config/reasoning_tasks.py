"""Problems of the package reasoning-gym as rows, by name: `reasoning_gym:TASK?size=1000&seed=1`.

Further settings are those of the task, such as `&max_terms=3`. The library draws problem i by seed + i, so all
processes make the same rows.
"""

from __future__ import annotations

import inspect
import json
import re
import zlib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any
from urllib.parse import parse_qsl

from mrl.packages import pip_install_extra

PREFIX = "reasoning_gym:"
COLUMN = "reasoning_gym"  # the problem of a row: {"source", "index", "checksum"}
MAX_SIZE = 1_000_000
BY_HASH = ("isomorphic_strings", "ransom_note", "word_ladder")  # drawn from sets, whose order a process decides
_EVALUATES = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\((?!entry)")


def is_task(path: str) -> bool:
    """Returns True if a data source is not a path, but problems of reasoning-gym."""
    return path.startswith(PREFIX)


@cache
def rows(name: str) -> list[dict[str, Any]]:
    """Returns the rows of a source. Raises ValueError, which says what is wrong with its name."""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    problems, task = _problems(name), _parsed(name)[0]
    return [
        {
            **{"system": SYSTEM_PROMPTS["default"], "prompt": problem["question"], "answer": str(problem["answer"])},
            **{"data_source": task, COLUMN: {"source": name, "index": i, "checksum": _checksum(problem)}},
        }
        for i, problem in enumerate(problems)
    ]


def columns(name: str) -> dict[str, type]:
    """Returns the columns of a source and their types. Raises ValueError, which says what is wrong with its name."""
    _problems(name)
    return {"system": str, "prompt": str, "answer": str, "data_source": str, COLUMN: dict}


def share_problems(one: str, other: str) -> bool:
    """Returns True if two sources draw some problems by the same seed and settings. Raises ValueError for an invalid
    name.
    """
    if not (is_task(one) and is_task(other)):
        return False
    (task, settings), (task_of_other, settings_of_other) = _parsed(one), _parsed(other)
    seeds = [range(s["seed"], s["seed"] + s["size"]) for s in (settings, settings_of_other)]
    for found in (settings, settings_of_other):
        del found["seed"], found["size"]
    is_same = (task, settings) == (task_of_other, settings_of_other)
    return is_same and max(seeds[0].start, seeds[1].start) < min(seeds[0].stop, seeds[1].stop)


def score(answer: str, row: Mapping[str, Any]) -> float:
    """Returns the library's own score of an answer. Raises ValueError for a row of another source."""
    if problem := row_problem(row):
        raise ValueError(problem)
    found = row[COLUMN]
    problems = _problems(found["source"])
    problem = problems[found["index"]]
    if _checksum(problem) != found.get("checksum"):
        raise ValueError(
            f"problem {found['index']} of {found['source']} is another one in each process: report the task"
        )
    return float(problems.score_answer(answer, problem))


def row_problem(row: Mapping[str, Any]) -> str | None:
    """Returns the reason why a row cannot be scored; None if it can."""
    found = row.get(COLUMN)
    if isinstance(found, dict) and is_task(str(found.get("source"))) and isinstance(found.get("index"), int):
        return None
    return f"the row is not of a source {PREFIX}TASK, which the built-in {COLUMN} needs"


def _checksum(problem: Mapping[str, Any]) -> int:
    return zlib.crc32(f"{problem['question']}\0{problem['answer']}".encode())


def _parsed(name: str) -> tuple[str, dict[str, Any]]:
    task, _, query = name.removeprefix(PREFIX).partition("?")
    settings = {"seed": 0} | parse_settings(query)
    size, seed = settings.get("size"), settings["seed"]
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= MAX_SIZE:
        raise ValueError(f"size must be 1 to {MAX_SIZE}: write {PREFIX}{task}?size=1000&seed=1")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed is {seed!r}: it must be a number from 0 on")
    return task, settings


def parse_settings(query: str) -> dict[str, Any]:
    """Returns the settings of a query such as `size=9&kind=a`, whose values are JSON or text. Raises ValueError."""
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a setting occurs twice")
    return {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@cache
def _problems(name: str) -> Any:
    task, settings = _parsed(name)
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(f"the package reasoning-gym is missing ({error}): {pip_install_extra('tasks')}") from None
    if task not in DATASETS:
        near = get_close_matches(task, DATASETS)
        raise ValueError(f"reasoning-gym has no task {task!r}; close: {', '.join(near) or 'none'}")
    if _EVALUATES.search(inspect.getsource(DATASETS[task][0])):
        raise ValueError(f"the scorer of {task} runs responses as Python code, and mrl only does that in a sandbox")
    if task in BY_HASH:
        raise ValueError(f"reasoning-gym draws other problems of {task} in each process")
    try:
        problems = create_dataset(task, **settings)
        problems[0]
    except Exception as error:
        raise ValueError(f"reasoning-gym refuses these settings: {type(error).__name__}: {error}") from error
    return problems
