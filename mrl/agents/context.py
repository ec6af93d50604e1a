"""Context of a user's agent program, in its worker process. Standard library only: workers start with it.

A program is `async def rollout(ctx, prompt)` or a class with `reset(row, rng)` and `step(turn)`, as in Gymnasium.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mrl import strict_json, user_functions
from mrl.agents.chat import Message
from mrl.agents.endpoint import Endpoint, Session
from mrl.agents.tool_call_parsers import ParsedCalls, Parser, Tool, ToolCall

if TYPE_CHECKING:
    from mrl.reward.sandbox import ProgramResult

Observation = str | list[Message]  # text where there is no chat template
Program = Callable[["Context", str], Awaitable[Any]]
MAX_IGNORED = 32  # number of NoTurnsLeft errors before a program is ended


class NoTurnsLeft(Exception):
    """Raised if the model has no turn left: agent.max_turns or agent.max_tokens is reached, or its last turn was
    truncated. A program that does not catch it ends with its rewards so far; so does one that catches it and keeps
    asking for turns.
    """


@dataclass(frozen=True)
class Turn:
    """A turn of the model. finish: "stop", or "length" if max_new_tokens truncated it; number: from 0

    calls: tool calls as agent.parser reads them; call_error: position and reason of unreadable calls, for the model. A
    truncated turn has neither
    """

    text: str
    ids: tuple[int, ...]
    finish: str
    number: int
    calls: tuple[ToolCall, ...] = ()
    call_error: str = ""


@dataclass(eq=False, repr=False)
class Context:
    """One trajectory, of the prompt in `row`."""

    row: dict[str, Any]
    rng: random.Random  # its numbers are the same whenever this trajectory is generated
    # Declarations in OpenAI's form, from which agent.parser takes the types of arguments; those of the row, until the
    # program sets others.
    tools: Sequence[Tool]
    endpoint: Endpoint | None  # with agent.endpoint: where a harness requests turns, in place of `generate`
    _session: Session
    _parser: Parser | None
    _sandbox: Mapping[str, Any]  # agent.sandbox
    _max_bytes: float
    why_over: str = ""  # why the model has no turn left, once the program has received it
    score: float | None = None  # the sum of the rewards so far; None: there were none
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _new_reward: float = 0.0
    _said: list[Message | str] = field(default_factory=list)
    _said_bytes: int = 0
    _ignored: int = 0
    _asked: asyncio.Future[dict[str, Any]] | None = None  # a turn not yet received
    _is_waiting: bool = False

    async def generate(self) -> Turn:
        """Returns the model's next turn, after everything that was said to it.

        Raises NoTurnsLeft if there is none, RuntimeError with agent.endpoint or if another call of this trajectory
        waits for its turn. A cancelled call, as by asyncio.wait_for, is not lost: the next call returns its turn.
        """
        if self.endpoint is not None:
            raise RuntimeError("ctx.generate() does not work with agent.endpoint: request turns at ctx.endpoint")
        if self._is_waiting:
            raise RuntimeError("ctx.generate() was called while another call waits for its turn: await one at a time")
        if self._said_bytes > self._max_bytes:
            self.why_over = f"{self._said_bytes} bytes of messages, more than agent.max_tokens can hold"
        if self.why_over:
            self._ignored += 1
            if self._ignored > MAX_IGNORED:
                self.ended.set()
                await asyncio.Event().wait()  # until the worker cancels the program
            raise NoTurnsLeft(self.why_over)
        if self._asked is None:
            said, self._said, self._said_bytes = self._said, [], 0
            self._asked = asyncio.wrap_future(self._session.ask("say", said))  # this process ends with rank 0
        self._is_waiting = True
        try:
            answer = await asyncio.shield(self._asked)
        finally:
            self._is_waiting = False
        self._asked = None
        if "over" in answer:
            self.why_over = answer["over"]
            raise NoTurnsLeft(self.why_over)
        turn = answer["turn"]
        found = parse_calls(turn, self._parser, self.tools)
        return Turn(turn["text"], tuple(turn["ids"]), turn["finish"], turn["number"], found.calls, found.error)

    async def sandbox(self, code: str, stdin: str = "") -> ProgramResult:
        """Runs a Python program in a sandbox as agent.sandbox says, and returns its result (`how`, `ok`, `stdout`,
        `stderr`); other trajectories continue meanwhile. A failure of the program is not an error; raises
        SandboxError if it cannot be sandboxed.
        """
        from mrl.reward.sandbox import Limits, run_python

        limits = dict(self._sandbox)
        isolation = limits.pop("isolation")
        return await asyncio.to_thread(run_python, code, stdin, limits=Limits(**limits), isolation=isolation)

    def say(self, words: Observation) -> None:
        """Adds text for the model before its next turn, which is not trained on: messages, such as [{"role": "user",
        "content": "lower"}], or text if data.chat_template is false. Raises ValueError for an unpaired surrogate,
        which no tokenizer accepts, and for NaN and infinities, which JSON does not allow.
        """
        self._said_bytes += len(strict_json.dumps(words, default=str, ensure_ascii=False).encode())
        self._said += [words] if isinstance(words, str) else words

    def reward(self, value: float) -> None:
        """Adds to the score, as a reward for the last turn: gae and reinforce_plus_plus also credit earlier turns.
        Raises ValueError unless the value is a finite number.
        """
        value = float(value)
        if not math.isfinite(value):
            raise ValueError(f"the reward is {value!r}: it must be a finite number")
        self.score = (self.score or 0.0) + value
        self._new_reward += value

    def take_reward(self) -> float:
        """Returns the rewards since the last call."""
        value, self._new_reward = self._new_reward, 0.0
        return value


def parse_calls(turn: Mapping[str, Any], parser: Parser | None, tools: Sequence[Tool]) -> ParsedCalls:
    """Returns the parser's result for a turn; without a parser, and for a truncated turn, its text alone."""
    if parser is None or turn["finish"] != "stop":
        return ParsedCalls((), "", turn["text"])
    return parser(turn["text"] if turn.get("shown") is None else turn["shown"], tools)


def load_program(spec: str, has_endpoint: bool = False) -> Program:
    """Returns the program of `path/to/file.py:name`, with an endpoint also a plain function. Raises FunctionError."""
    found = user_functions.find(spec, "agent.rollout")
    if inspect.iscoroutinefunction(found):
        return found
    if has_endpoint and inspect.isfunction(found):
        return _harness_program(found)
    if not has_endpoint and inspect.isclass(found):
        lacking = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if not lacking:
            return _environment_program(found)
        why = f"the class has no {' and no '.join(lacking)}"
    elif has_endpoint:
        why = "it is not a function (ctx, prompt), which agent.endpoint needs"
    else:
        why = "it is neither `async def rollout(ctx, prompt)` nor a class with reset and step"
    raise user_functions.FunctionError(f"agent.rollout {spec!r}: {why}")


def _harness_program(function: Callable[[Context, str], Any]) -> Program:
    async def play(ctx: Context, prompt: str) -> Any:
        def run() -> Any:
            try:
                return function(ctx, prompt)
            except SystemExit as error:  # would end the process
                raise RuntimeError(f"the program ended with SystemExit({error.code!r})") from None

        thread = ThreadPoolExecutor(1)  # its own: all trajectories may wait for turns at once
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, run)
        finally:
            thread.shutdown(wait=False)

    return play


def _environment_program(kind: type[Any]) -> Program:
    """Returns the program of a class: reset(row, rng) begins, and may return text after the prompt; step(turn) returns
    (text, reward, done), with None for no reward; close(), if there is one, ends. Methods that are not `async` run in a
    thread of the trajectory's own, so that a slow one holds up no other trajectory.
    """

    async def play(ctx: Context, prompt: str) -> None:
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1)

        async def call(method: Callable[..., Any], *arguments: Any) -> Any:
            if inspect.iscoroutinefunction(method):
                return await method(*arguments)
            value = await loop.run_in_executor(thread, method, *arguments)
            return await value if inspect.isawaitable(value) else value

        environment = None
        try:
            environment = await call(kind)
            if (begins := await call(environment.reset, ctx.row, ctx.rng)) is not None:
                ctx.say(begins)
            while True:
                said, reward, done = await call(environment.step, await ctx.generate())
                if reward is not None:
                    ctx.reward(reward)
                if done:
                    return
                ctx.say(said)
        finally:
            if (close := getattr(environment, "close", None)) is not None:
                await call(close)
            thread.shutdown(wait=False)

    return play


def score_of(result: Any, ctx: Context, is_over: bool = False) -> dict[str, float]:
    """Returns a program's result plus its rewards: "score", and other numbers by name. Raises ValueError for others.

    A program that ended by itself, without a result and without a reward, has no "score". is_over: the model had no
    turn left, so that the score is that of the rewards so far, 0 without any
    """
    if isinstance(result, Mapping):
        parts = {str(name): value for name, value in result.items()}
    else:
        parts = {} if result is None else {"score": result}
    for name, value in parts.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}: it must be a finite number")
    if "score" in parts or ctx.score is not None or is_over:
        parts["score"] = parts.get("score", 0.0) + (ctx.score or 0.0)
        if not math.isfinite(parts["score"]):
            raise ValueError(f"score is {parts['score']!r}: it must be a finite number")
    return {name: float(value) for name, value in parts.items()}
