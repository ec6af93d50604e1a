"""Reward worker: `python -m mrl.reward.worker FD PARENT_PID`, started by `mrl.workers`.

Each message is a pickled (component's name, calls), and is answered by {"results": [{"score", "parts"} or {"error"},
one a call]}, or {"error": text, "no_verdict": bool}.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from mrl.reward.errors import NoVerdict, RewardError
from mrl.reward.images import load_images
from mrl.reward.loading import Settings, check_result, check_results, load, load_batch
from mrl.reward.plan import Component
from mrl.reward.score_requests import ScoreRequest
from mrl.workers.child import PoolConnection, describe

BatchFunction = Callable[[list[ScoreRequest]], list[Any]]
Functions = dict[str, BatchFunction]
MAX_TRACEBACK_CHARS = 8000


def main() -> None:
    pool = PoolConnection()
    functions = pool.load(lambda setup: _load(**setup), RewardError)
    for number, payload in pool.messages():
        pool.send(number, {**_score(functions, payload), "last": True})


def _load(components: Sequence[Component], settings: Settings, answer_key: str, pictures: bool) -> Functions:
    return {each.name: _function(each, settings, answer_key, pictures) for each in components}


def _function(component: Component, settings: Settings, answer_key: str, pictures: bool) -> BatchFunction:
    """Returns a component's function as a function of a list of calls."""
    spec, where = component.spec, component.where
    if component.kind == "function":
        single = load(spec, answer_key, where, settings, pictures=pictures)
        return lambda calls: [single(call) for call in calls]
    is_of_images = component.kind == "images"
    batch = load_images(spec, where, settings) if is_of_images else load_batch(spec, where, pictures=pictures)
    return lambda calls: check_results(batch(calls), len(calls))


def _score(functions: Functions, payload: bytes) -> dict[str, Any]:
    try:
        name, calls = pickle.loads(payload)
        results = functions[name](calls)
    except BaseException as error:  # noqa: BLE001 - a user's sys.exit() must not end the worker; it is reported
        inner = error.__traceback__ and error.__traceback__.tb_next  # without this file's own frame
        text = describe(error.with_traceback(inner), MAX_TRACEBACK_CHARS)
        return {"error": text, "no_verdict": isinstance(error, NoVerdict)}
    return {"results": [_checked(result) for result in results]}


def _checked(result: object) -> dict[str, Any]:
    try:
        outcome = check_result(result)
    except (TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"score": outcome.score, "parts": outcome.parts}


if __name__ == "__main__":
    main()
