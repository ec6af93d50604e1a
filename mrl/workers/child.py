"""Worker's side of a pool, for programs that `WorkerProcess` starts. Standard library only.

The socket carries frames of multiprocessing.connection. The pool sends a pickled setup; the worker answers {"ready":
true} or {"load_error": text}. The pool then sends messages, after the 8 bytes of a session's number: an empty one ends
the session, and number 0 is a ping. The worker answers with JSON objects, whose "id" is that number. An object with
"last" is the session's last one.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from mrl import strict_json
from mrl.forks import die_with_parent

NUMBER = struct.Struct("!Q")  # of a session, before each of its messages
T = TypeVar("T")


class PoolConnection:
    """Connection to the pool. The kernel kills this process when the thread that started it ends."""

    def __init__(self) -> None:
        die_with_parent()
        if os.getppid() != int(sys.argv[2]):
            os._exit(1)
        self._connection = Connection(int(sys.argv[1]))
        self._sending = threading.Lock()

    def load(self, load: Callable[[dict[str, Any]], T], error: type[Exception]) -> T:
        """Returns what `load` makes of the setup; its `error` ends the program, and is the pool's."""
        setup = self._connection.recv()
        sys.path[:] = setup.pop("sys_path")
        try:
            loaded = load(setup)
        except error as problem:
            self._send({"load_error": str(problem)})
            sys.exit()
        self._send({"ready": True})
        return loaded

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Yields sessions' numbers and messages, until the pool is gone."""
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            yield NUMBER.unpack_from(data)[0], data[NUMBER.size :]

    def send(self, number: int, answer: dict[str, Any]) -> None:
        """Sends an answer of a session, from any thread. Raises ValueError for values that JSON cannot hold."""
        self._send({"id": number, **answer})

    def _send(self, answer: dict[str, Any]) -> None:
        data = strict_json.dumps(answer, default=str, ensure_ascii=False).encode(errors="replace")
        with self._sending:
            try:
                self._connection.send_bytes(data)
            except OSError:
                os._exit(0)  # the pool is gone


def describe(error: BaseException, max_chars: int) -> str:
    """Returns the traceback, without the middle of a longer one, such as of an endless recursion."""
    text, half = "".join(traceback.format_exception(error)), max_chars // 2
    if len(text) <= max_chars:
        return text
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
