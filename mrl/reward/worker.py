"""A reward worker: `python -m mrl.reward.worker FD PARENT_PID`, started by `mrl.reward.process`.

On the socket FD it gets a pickled setup (sys.path, function, answer key), says {"ready": true} or {"load_error": text},
then takes lists of pickled (prompt, response, row) and answers each of them at once with one JSON object, in order. It
ends when the other side closes, and the kernel kills it when the thread that started it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from mrl.reward.errors import RewardError
from mrl.reward.loading import RewardFunction, check_result, load

PR_SET_PDEATHSIG = 1
MAX_TRACEBACK_CHARS = 8000


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    connection = Connection(fd)
    try:
        setup = connection.recv()
        sys.path[:] = setup["sys_path"]
        try:
            function = load(setup["function"], setup["answer_key"])
        except RewardError as error:
            _send(connection, {"load_error": str(error)})
            return
        _send(connection, {"ready": True})
        while True:
            for payload in connection.recv():
                _send(connection, _score(function, payload))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool is gone


def _die_with(parent: int) -> None:
    """SIGKILL for this process when its parent ends, however that happens and whatever runs here."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _score(function: RewardFunction, payload: bytes) -> dict[str, Any]:
    try:
        prompt, response, row = pickle.loads(payload)
        score, parts = check_result(function(prompt, response, row))
    except BaseException as error:  # noqa: BLE001 - a user's sys.exit() must not end the worker; it is reported
        return {"error": _describe(error)}
    return {"score": score, "parts": parts}


def _describe(error: BaseException) -> str:
    """The traceback below this file's own frame."""
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, inner))
    return text if len(text) <= MAX_TRACEBACK_CHARS else "...\n" + text[-MAX_TRACEBACK_CHARS:]


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main()
