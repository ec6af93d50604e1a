"""Worker that runs agents' programs: `python -m mrl.agents.worker FD PARENT_PID`, started by `mrl.workers`.

Each trajectory is a session, whose messages are JSON. {"start": {"row", "tools", "prompt", "seed"}} begins it, {"turn":
{...}} and {"over": why} answer its request. The worker sends {"say": [...]}, which requests a turn, and at the end
{"done": {"score", ...}, "over": why} or {"error": one line, "traceback": text}; each has "reward", the sum of the
rewards since the previous one.

With an endpoint, {"chat": {"messages", "tools"}} requests a turn, and {"answer": {"text", "finish", "tokens"}},
{"over": why} or {"refused": why} answers it. {"count": {"messages", "tools"}} asks how many tokens precede such a turn,
and {"count": number} answers it. The next request or the end then has "arrived": the message that the harness received
as the last answer, null if the harness was gone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mrl.agents.chat import tool_call
from mrl.agents.context import Context, NoTurnsLeft, Program, load_program, parse_calls, score_of
from mrl.agents.endpoint import Session
from mrl.agents.tool_call_parsers import Parser, Tool, load_parser
from mrl.agents.verifiers_program import load_environment_program
from mrl.config.verifiers_environments import is_environment
from mrl.user_functions import FunctionError
from mrl.workers.child import PoolConnection, describe

if TYPE_CHECKING:
    from mrl.agents.endpoint_server import EndpointServer

MAX_TRACEBACK_CHARS = 1 << 20
MAX_LINE_CHARS = 2000
CLEAN_UP_S = 1.0  # time for the `finally` of a program that is cancelled


def main() -> None:
    pool = PoolConnection()
    asyncio.run(_Trajectories(pool, *pool.load(_load, FunctionError)).run())


def _load(setup: dict[str, Any]) -> tuple[dict[str, Any], Program, Parser | None]:
    parser = load_parser(setup["parser"]) if setup["parser"] is not None else None
    if is_environment(setup["rollout"]):
        return setup, load_environment_program(setup["rollout"], parser), parser
    return setup, load_program(setup["rollout"], setup["endpoint"]), parser


class _Trajectories:
    """Runs the trajectories of this process, each as a task of its event loop."""

    def __init__(self, pool: PoolConnection, setup: dict[str, Any], program: Program, parser: Parser | None) -> None:
        self._pool, self._setup, self._program, self._parser = pool, setup, program, parser
        self._server: EndpointServer | None = None
        if setup["endpoint"]:
            from mrl.agents.endpoint_server import EndpointServer  # its imports take 0.3 s

            self._server = EndpointServer()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sessions: dict[int, Session] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()  # for ever: the thread ends the process

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receives messages until the pool is gone. Answers bypass the loop, which a program that waits may block."""
        for number, message in self._pool.messages():
            session = self._sessions.get(number)
            if session is not None and message:
                session.answer(json.loads(message))
            else:
                loop.call_soon_threadsafe(self._take, number, message)
        os._exit(0)

    def _take(self, number: int, data: bytes) -> None:
        if number == 0:
            self._pool.send(0, {})
            return
        if not data:
            if (task := self._tasks.pop(number, None)) is not None:
                task.cancel()
        elif "start" in (message := json.loads(data)):
            self._tasks[number] = asyncio.ensure_future(self._play(number, **message["start"]))

    async def _play(self, number: int, row: dict[str, Any], tools: Sequence[Tool], prompt: str, seed: int) -> None:
        def ask(question: dict[str, Any]) -> None:
            self._pool.send(number, {**question, "reward": ctx.take_reward(), "arrived": session.arrived})

        max_bytes, sandbox = self._setup["max_bytes"], self._setup["sandbox"]
        session = self._sessions[number] = Session(ask, self._message, self._setup["answer_timeout_s"], max_bytes)
        endpoint = self._server.open(session) if self._server is not None else None
        ctx = Context(row, random.Random(seed), tools, endpoint, session, self._parser, sandbox, max_bytes)
        try:
            answer = await self._result(ctx, prompt, session)
        finally:
            if self._server is not None and endpoint is not None:
                self._server.revoke(endpoint)
            self._sessions.pop(number, None)
        self._tasks.pop(number, None)
        end = {"reward": ctx.take_reward(), "arrived": session.arrived, "last": True}
        self._pool.send(number, {**answer, **end})

    async def _result(self, ctx: Context, prompt: str, session: Session) -> dict[str, Any]:
        result = None
        try:
            try:
                result = await self._until_ended(ctx, prompt)
            except NoTurnsLeft:
                pass
            except Exception:
                if not session.why_over:  # a harness may fail in any way after it was told that
                    raise
            over = ctx.why_over or session.why_over
            return {"done": score_of(result, ctx, bool(over)), "over": over}
        except (Exception, asyncio.CancelledError) as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            return {"error": line[:MAX_LINE_CHARS], "traceback": describe(error, MAX_TRACEBACK_CHARS)}

    async def _until_ended(self, ctx: Context, prompt: str) -> Any:
        """Returns the program's result; None if it keeps requesting turns after it was told that there are none."""
        program = asyncio.ensure_future(self._program(ctx, prompt))
        ended = asyncio.ensure_future(ctx.ended.wait())
        try:
            await asyncio.wait({program, ended}, return_when=asyncio.FIRST_COMPLETED)
            return program.result() if program.done() else None
        finally:
            ended.cancel()
            if not program.done():
                program.cancel()
                await asyncio.wait({program}, timeout=CLEAN_UP_S)

    def _message(self, answer: dict[str, Any], number: int, tools: Sequence[Tool]) -> dict[str, Any]:
        """Returns a turn as the harness's message. An unreadable call stays text."""
        found = parse_calls(answer, self._parser, tools)
        if not found.calls and answer.get("shown") is None:  # else the text lacks the special tokens of the format
            return {"role": "assistant", "content": answer["text"]}
        made = [
            tool_call(f"call_{number}_{i}", call.name, call.arguments, "a call") for i, call in enumerate(found.calls)
        ]
        return {"role": "assistant", "content": found.content, **({"tool_calls": made} if made else {})}


if __name__ == "__main__":
    main()
