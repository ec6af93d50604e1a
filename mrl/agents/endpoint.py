"""Endpoint of OpenAI's and Anthropic's APIs for a trajectory: its address and key, and its requests. Standard library
only: workers start with it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mrl import strict_json
from mrl.agents.chat import Answer, BadChat, Message

MAX_REFUSALS = 32  # of one trajectory; later requests are not forwarded, and agent.step_timeout_s ends it
MAX_COUNTS = 100  # requests of token counts for each answer of a trajectory, on average
OVER = "this model's maximum context length is exceeded"  # words by which harnesses recognise the error


@dataclass(frozen=True)
class Endpoint:
    """Address (OpenAI's clients: `url`) and `key` that a program passes to its harness, for one trajectory."""

    url: str
    key: str = field(repr=False)

    @property
    def anthropic_url(self) -> str:
        """The address for Anthropic's clients, which append /v1 themselves."""
        return self.url.removesuffix("/v1")

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of this process plus the endpoint, for a harness in its own process."""
        anthropic = dict.fromkeys(("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"), self.key)
        openai = {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": self.key}
        return {**os.environ, **openai, **anthropic, "ANTHROPIC_BASE_URL": self.anthropic_url}


@dataclass(eq=False)
class Session:
    """Questions of one trajectory to rank 0: by its program, or by its harness's requests, one after the other."""

    send: Callable[[Message], None]  # sends a question to rank 0, which replies by `answer`
    parse: Callable[[Message, int, list[Message]], Message]  # of an answer, its number and its tools: the message
    timeout_s: float  # that a request waits for rank 0
    max_bytes: float  # of a request's messages and tools; longer ones are refused at once
    turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    arrived: Message | None = field(default=None, init=False)  # the last answer, unless its harness was gone
    why_over: str = field(default="", init=False)  # why the model has no turn left, once the harness has received it
    _answers: int = field(default=0, init=False)
    _refusals: int = field(default=0, init=False)
    _counts: int = field(default=0, init=False)
    _state: threading.Lock = field(default_factory=threading.Lock, init=False)
    _waits: Future[Message] | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)

    async def generate(self, question: Message) -> Answer:
        """Returns the model's next turn. Raises BadChat. The caller holds `turn`."""
        told = (await self._reply("chat", question))["answer"]
        self._answers += 1
        message = await asyncio.to_thread(self.parse, told, self._answers, question["tools"])
        return Answer(self._answers, message, told["finish"], told["tokens"])

    async def count(self, question: Message) -> int:
        """Returns the number of tokens before the turn that answers a question. The caller holds `turn`."""
        self._counts += 1
        if self._counts > MAX_COUNTS * (1 + self._answers):
            raise BadChat(f"tokens were counted {MAX_COUNTS} times for each answer: end the harness")
        tokens: int = (await self._reply("count", question))["count"]
        return tokens

    async def _reply(self, kind: str, question: Message) -> Message:
        if self._refusals >= MAX_REFUSALS:
            raise BadChat(f"{MAX_REFUSALS} requests were rejected: end the harness")
        size = len(strict_json.dumps(question, ensure_ascii=False).encode("utf-8", "replace"))
        answer: Message
        if size > self.max_bytes:
            answer = {"over": f"the messages and tools have {size} bytes, more than agent.max_tokens can hold"}
        else:
            try:
                waits = await asyncio.to_thread(self.ask, kind, question)
                answer = await asyncio.wait_for(asyncio.wrap_future(waits), self.timeout_s)
            except TimeoutError:
                raise BadChat(f"the run did not respond within {self.timeout_s:g} s", status=504) from None
        self._refusals += not {"answer", "count"} & answer.keys()
        if "over" in answer:
            self.why_over = answer["over"]
            raise BadChat(f"the model has no turns left: {answer['over']} ({OVER})", code="context_length_exceeded")
        if "refused" in answer:
            raise BadChat(answer["refused"], "messages")
        return answer

    def ask(self, kind: str, question: Any) -> Future[Message]:
        """Sends a question to rank 0, and returns its future reply. Raises BadChat once the trajectory has ended."""
        waits: Future[Message] = Future()
        with self._state:
            if self._is_closed:
                raise _ended()
            self._waits = waits
            self.send({kind: question})
            self.arrived = None
        return waits

    def answer(self, message: Message) -> None:
        """Receives rank 0's reply."""
        with self._state:
            if self._waits is not None and not self._waits.done():
                self._waits.set_result(message)

    def close(self) -> None:
        """Refuses the request that waits, and all further ones."""
        with self._state:
            self._is_closed = True
            if self._waits is not None and not self._waits.done():
                self._waits.set_exception(_ended())


def _ended() -> BadChat:
    return BadChat("the trajectory of this key has ended", status=401, code="invalid_api_key")
