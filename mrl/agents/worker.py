"""A worker that runs agents' programs: `python -m mrl.agents.worker FD`, started by `mrl.agents.pool`.

On the socket FD come JSON objects. First the setup {"sys_path", "rollout", "parser", "sandbox"}, answered by {"ready":
true} or {"load_error": text}. Then {"id", "start": {"row", "prompt", "seed"}} begins a trajectory, {"id", "turn":
{...}} and {"id", "over": why} answer one that has asked, {"drop": true} ends all. Of each trajectory come {"id", "say":
[...]}, which asks for a turn, and at its end {"id", "done": {"score", ...}} or {"id", "error": text}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

from mrl.agents.calls import Parser, load_parser
from mrl.agents.context import Context, Over, Program, load_program, score_of
from mrl.user_functions import FunctionError

MAX_TRACEBACK_CHARS = 8000


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    setup = json.loads(connection.recv_bytes())
    sys.path[:] = setup["sys_path"]
    try:
        program = load_program(setup["rollout"])
        parser = load_parser(setup["parser"]) if setup["parser"] is not None else None
    except FunctionError as error:
        _send(connection, {"load_error": str(error)})
        return
    _send(connection, {"ready": True})
    asyncio.run(_Trajectories(connection, program, parser, setup["sandbox"]).run())


class _Trajectories:
    """All of this process, each a task of its loop."""

    def __init__(self, connection: Connection, program: Program, parser: Parser | None, limits: dict[str, Any]) -> None:
        self._parser, self._limits = parser, limits
        self._connection, self._program = connection, program
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()  # for ever: the thread ends the process

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends the process, whatever its programs do, when the other side is gone."""
        try:
            while True:
                loop.call_soon_threadsafe(self._take, json.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    def _take(self, message: dict[str, Any]) -> None:
        if "drop" in message:
            for task in self._tasks.values():
                task.cancel()
            self._tasks.clear()
            self._waiting.clear()
            return
        number = message["id"]
        if "start" in message:
            self._tasks[number] = asyncio.ensure_future(self._play(number, **message["start"]))
        elif (waits := self._waiting.pop(number, None)) is not None:
            waits.set_result(message["turn"] if "turn" in message else {"over": message["over"]})

    async def _play(self, number: int, row: dict[str, Any], prompt: str, seed: int) -> None:
        async def ask(question: dict[str, Any]) -> dict[str, Any]:
            self._waiting[number] = asyncio.get_running_loop().create_future()
            _send(self._connection, {"id": number, **question})
            return await self._waiting[number]

        ctx = Context(ask, row, seed, self._parser, self._limits)
        try:
            try:
                result = await self._program(ctx, prompt)
            except Over:
                result = None
            answer: dict[str, Any] = {"done": score_of(result, ctx)}
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            answer = {"error": text[-MAX_TRACEBACK_CHARS:]}
        self._tasks.pop(number, None)
        _send(self._connection, {"id": number, **answer})


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message, default=str).encode())


if __name__ == "__main__":
    main()
