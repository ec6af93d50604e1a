"""Reward worker: `python -m mrl.reward.worker FD PARENT_PID`, started by `mrl.reward.process`.

On the socket FD it receives a pickled setup (sys_path, components, answer_key, settings, pictures) and sends {"ready":
true} or {"load_error": text}. It then receives lists of jobs, each a pickled (component's name, calls), and answers
each at once with one JSON object, in order: {"results": [{"score", "parts"} or {"error"}, one a call]}, or {"error":
text, "no_verdict": bool}. It exits when the other side closes, and the kernel kills it when the thread that started it
ends.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from mrl.forks import die_with_parent
from mrl.reward.errors import NoVerdict, RewardError
from mrl.reward.images import load_images
from mrl.reward.loading import Settings, check_result, check_results, load, load_batch
from mrl.reward.plan import Component
from mrl.reward.score_requests import ScoreRequest

BatchFunction = Callable[[list[ScoreRequest]], list[Any]]
MAX_TRACEBACK_CHARS = 8000


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    connection = Connection(fd)
    try:
        setup = connection.recv()
        sys.path[:] = setup["sys_path"]
        try:
            known = setup["answer_key"], setup["settings"], setup["pictures"]
            functions = {c.name: _load(c, *known) for c in setup["components"]}
        except RewardError as error:
            _send(connection, {"load_error": str(error)})
            return
        _send(connection, {"ready": True})
        while True:
            for payload in connection.recv():
                _send(connection, _score(functions, payload))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool is gone


def _load(component: Component, answer_key: str, settings: Settings, pictures: bool) -> BatchFunction:
    """Returns a component's function as a function of a list of calls."""
    if component.kind in ("batch", "images"):
        if component.kind == "images":
            batch = load_images(component.spec, component.where, settings)
        else:
            batch = load_batch(component.spec, component.where, pictures=pictures)
        return lambda calls: check_results(batch(calls), len(calls))
    single = load(component.spec, answer_key, component.where, settings, pictures=pictures)
    return lambda calls: [single(call) for call in calls]


def _score(functions: dict[str, BatchFunction], payload: bytes) -> dict[str, Any]:
    try:
        name, calls = pickle.loads(payload)
        results = functions[name](calls)
    except BaseException as error:  # noqa: BLE001 - a user's sys.exit() must not end the worker; it is reported
        return {"error": _describe(error), "no_verdict": isinstance(error, NoVerdict)}
    return {"results": [_checked(result) for result in results]}


def _checked(result: object) -> dict[str, Any]:
    try:
        outcome = check_result(result)
    except (TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"score": outcome.score, "parts": outcome.parts}


def _describe(error: BaseException) -> str:
    """Returns the traceback below this file's own frame."""
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, inner))
    return text if len(text) <= MAX_TRACEBACK_CHARS else "...\n" + text[-MAX_TRACEBACK_CHARS:]


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main()
