"""What a user's agent program gets, in its worker process. The standard library only: workers start with it.

A program is `async def rollout(ctx, prompt)` or a class with `reset(row, rng)` and `step(turn)`, as in Gymnasium.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mrl import strict_json, user_functions
from mrl.agents.calls import Call, Found, Parser
from mrl.agents.declared import Tool
from mrl.agents.endpoint import Endpoint

if TYPE_CHECKING:
    from mrl.reward.sandbox import Ended

Message = dict[str, Any]  # of a chat: "role", "content", and what else the chat template knows
Words = str | list[Message]  # text where there is no chat template
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
Program = Callable[["Context", str], Awaitable[Any]]


MAX_OVERS = 32  # times that a program is told that there is no turn left, before it is ended


class Over(Exception):
    """Raised where the model has no turn left: agent.max_turns or agent.max_tokens is reached, or its last turn was cut
    off. A program that lets it pass ends with the rewards that it has given so far, and so does one that catches it and
    asks on."""


@dataclass(frozen=True)
class Turn:
    """What the model has said. finish: "stop", or "length" where max_new_tokens cut it off; number: from 0

    calls: tool calls as agent.parser reads them; call_error: where and why others could not be read, for the model to
    hear. A turn that was cut off has neither
    """

    text: str
    ids: tuple[int, ...]
    finish: str
    number: int
    calls: tuple[Call, ...] = ()
    call_error: str = ""


class Context:
    """One trajectory, of the prompt in `row`.

    rng: random numbers that are the same whenever this trajectory is made
    tools: declarations of tools in OpenAI's form, from which agent.parser takes the types of arguments; those of the
        row, until the program sets others
    why_over: why the model has no turn left, once the program was told so
    endpoint: where agent.endpoint is set, what a harness asks for turns, in place of `generate`
    """

    def __init__(
        self,
        ask: Ask,
        row: dict[str, Any],
        seed: int,
        parser: Parser | None = None,
        limits: Mapping[str, Any] | None = None,
        endpoint: Endpoint | None = None,
        tools: Sequence[Tool] = (),
        max_bytes: float = math.inf,
    ) -> None:
        self.tools, self.ended = tools, asyncio.Event()
        self._max_bytes, self._said_bytes, self._overs, self.why_over = max_bytes, 0, 0, ""
        self._asked: asyncio.Future[dict[str, Any]] | None = None  # a turn that no program has got yet
        self._is_waiting = False
        self._parser, self._limits = parser, dict(limits or {})
        self.row, self.rng, self.endpoint = row, random.Random(seed), endpoint
        self.score, self._new_reward = 0.0, 0.0
        self._ask, self._said = ask, list[Message | str]()

    async def generate(self) -> Turn:
        """Returns the model's next turn, after all that was said to it.

        Raises Over if there is none, RuntimeError where agent.endpoint is set or another call of this trajectory waits
        for its turn. A call that was cancelled, as by asyncio.wait_for, is gone on with: the next one returns its turn.
        """
        if self.endpoint is not None:
            raise RuntimeError("with agent.endpoint turns are asked for at ctx.endpoint")
        if self._is_waiting:
            raise RuntimeError("ctx.generate() was called while another call waits for its turn: await one at a time")
        if self._said_bytes > self._max_bytes:
            self.why_over = f"{self._said_bytes} bytes were said, more than agent.max_tokens can hold"
        if self.why_over:
            self._overs += 1
            if self._overs > MAX_OVERS:
                self.ended.set()
                await asyncio.Event().wait()  # until the worker cancels the program
            raise Over(self.why_over)
        if self._asked is None:
            said, self._said, self._said_bytes = self._said, [], 0
            self._asked = asyncio.ensure_future(self._ask({"say": said}))
        self._is_waiting = True
        try:
            answer = await asyncio.shield(self._asked)
        finally:
            self._is_waiting = False
        self._asked = None
        if "over" in answer:
            self.why_over = answer["over"]
            raise Over(self.why_over)
        found = found_in(answer, self._parser, self.tools)
        calls, error = (found.calls, found.error) if found is not None else ((), "")
        return Turn(answer["text"], tuple(answer["ids"]), answer["finish"], answer["number"], calls, error)

    async def sandbox(self, code: str, stdin: str = "") -> Ended:
        """What came of a Python program (`how`, `ok`, `stdout`, `stderr`), shut in as agent.sandbox says; others go on
        meanwhile. Whatever the program does is no error; raises SandboxError where it cannot be shut in."""
        from mrl.reward.sandbox import Limits, run_python

        limits = dict(self._limits)
        isolation = limits.pop("isolation")
        return await asyncio.to_thread(run_python, code, stdin, limits=Limits(**limits), isolation=isolation)

    def say(self, words: Words) -> None:
        """Adds what the model reads before its next turn, of which it learns nothing: messages, such as [{"role":
        "user", "content": "lower"}], or text where data.chat_template is false. Raises ValueError for half a character,
        which no tokenizer takes, and for NaN and infinities, which JSON does not hold."""
        self._said_bytes += len(strict_json.dumps(words, default=str, ensure_ascii=False).encode())
        self._said += [words] if isinstance(words, str) else words

    def reward(self, value: float) -> None:
        """Adds to the score, for the last turn: what gae and reinforce_plus_plus learn of turns before it is more.
        Raises ValueError for what is no finite number."""
        value = float(value)
        if not math.isfinite(value):
            raise ValueError(f"a reward is {value!r}, expected a finite number")
        self.score += value
        self._new_reward += value

    def take_reward(self) -> float:
        """What was given since this was asked last."""
        value, self._new_reward = self._new_reward, 0.0
        return value


def found_in(turn: Mapping[str, Any], parser: Parser | None, tools: Sequence[Tool]) -> Found | None:
    """Returns what the parser reads in a turn; None without a parser and for a turn that was cut off."""
    if parser is None or turn["finish"] != "stop":
        return None
    return parser(turn["text"] if turn.get("shown") is None else turn["shown"], tools)


def load_program(spec: str, has_endpoint: bool = False) -> Program:
    """The program of `path/to/file.py:name`. Raises FunctionError for what is none. has_endpoint: turns are asked for
    there; a plain function may then wait for them, in a thread of its own."""
    found = user_functions.find(spec, "agent.rollout")
    if has_endpoint:
        return _of_harness(found, spec)
    if inspect.isclass(found):
        lacking = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
        if lacking:
            raise user_functions.FunctionError(f"agent.rollout {spec!r}: the class has no {' and no '.join(lacking)}")
        return _of_environment(found)
    if not inspect.iscoroutinefunction(found):
        raise user_functions.FunctionError(
            f"agent.rollout {spec!r} is neither `async def rollout(ctx, prompt)` nor a class with reset and step"
        )
    return found


def _of_harness(found: Any, spec: str) -> Program:
    if inspect.iscoroutinefunction(found):
        return found
    if not inspect.isfunction(found):
        raise user_functions.FunctionError(
            f"agent.rollout {spec!r} is no function (ctx, prompt), which agent.endpoint is for"
        )
    return lambda ctx, prompt: _in_a_thread(found, ctx, prompt)


async def _in_a_thread(found: Callable[[Context, str], Any], ctx: Context, prompt: str) -> Any:
    """Of its own: all wait for turns at once, and a pool has fewer threads than there may be trajectories."""
    loop, ended = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if ended.cancelled():
            return
        if error is None:
            ended.set_result(value)
        else:
            ended.set_exception(error)

    def run() -> None:
        value: Any = None
        failed: Exception | None = None
        try:
            value = found(ctx, prompt)
        except SystemExit as error:
            failed = RuntimeError(f"the program has ended with SystemExit({error.code!r})")
        except Exception as error:
            failed = error
        loop.call_soon_threadsafe(tell, value, failed)

    threading.Thread(target=run, daemon=True, name="harness").start()
    return await ended


def _of_environment(kind: type[Any]) -> Program:
    """A class: reset(row, rng) begins, and may give what is said after the prompt; step(turn) gives (what it says, the
    reward, whether that was all); close(), if there is one, ends."""

    async def play(ctx: Context, prompt: str) -> None:
        environment = kind()
        try:
            if (begins := await _maybe(environment.reset(ctx.row, ctx.rng))) is not None:
                ctx.say(begins)
            while True:
                said, reward, done = await _maybe(environment.step(await ctx.generate()))
                ctx.reward(reward)
                if done:
                    return
                ctx.say(said)
        finally:
            if (close := getattr(environment, "close", None)) is not None:
                await _maybe(close())

    return play


async def _maybe(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def score_of(result: Any, ctx: Context) -> dict[str, float]:
    """What a program has returned, with the rewards that it gave on the way: "score", and other numbers by name. Raises
    ValueError for what is no score."""
    if isinstance(result, Mapping):
        parts = {str(name): value for name, value in result.items()}
    else:
        parts = {"score": 0.0 if result is None else result}
    parts["score"] = parts.get("score", 0.0) + ctx.score
    for name, value in parts.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, expected a finite number")
    return {name: float(value) for name, value in parts.items()}
