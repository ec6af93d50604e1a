"""Endpoint of OpenAI's and Anthropic's APIs in a worker process, for harnesses that are not written for mrl. Standard
library only. It listens on this machine only; each trajectory has its own key while its program runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol

from mrl import strict_json
from mrl.agents import anthropic_messages, chat, openai_responses
from mrl.agents.chat import Answer, BadChat, ChatRequest, Message

HOST = "127.0.0.1"
MAX_REFUSALS = 32  # of one trajectory; later requests are not forwarded, and agent.step_timeout_s ends it
MAX_COUNTS = 100  # requests of token counts for each answer of a trajectory, on average
MAX_UNAUTHENTICATED = 1000  # connections that have not shown a valid key; one more ends the oldest of them
MAX_HEAD_BYTES = 16 << 10  # of a request before its body: all that is read without a valid key
HEAD_S = 10.0  # until a new connection has sent the head of its first request
IDLE_S = 60.0  # until a connection with a key sends its next request, the whole body, or takes an answer
MAX_BODY_BYTES = 64 << 20
ACCEPT_BATCH = 16
BACKLOG = 1024  # connections that the kernel keeps until they are accepted
OVER = "this model's maximum context length is exceeded"  # words by which harnesses recognise the error
MODELS, MESSAGES, COUNT = "/v1/models", "/v1/messages", "/v1/messages/count_tokens"


class Form(Protocol):
    """Form of an API: a module that translates its requests and answers."""

    def parse_request(self, body: Any) -> ChatRequest: ...

    def completion(self, answer: Answer, asked: ChatRequest) -> Message: ...

    def events(self, answer: Answer, asked: ChatRequest) -> Iterable[Message | str]: ...


FORMS: dict[str, Form] = {
    "/v1/chat/completions": chat,
    MESSAGES: anthropic_messages,
    "/v1/responses": openai_responses,
}


@dataclass(frozen=True)
class Endpoint:
    """Address (`base_url`) and key (`api_key`) that a program passes to its harness, for one trajectory. url: for
    OpenAI's clients
    """

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


class Session:
    """Requests of one trajectory, one after the other.

    arrived: the last answer, unless its harness was gone; why_over: the reason why the model has no turn left, once the
    harness has received it

    Args:
        ask: sends a question to rank 0, which replies by `answer`.
        parse: makes the message of an answer, from its number and the request's tools.
        timeout_s: seconds to wait for rank 0.
        max_bytes: of a request's messages and tools; longer ones are refused at once.
    """

    def __init__(
        self,
        ask: Callable[[Message], None],
        parse: Callable[[Message, int, list[Message]], Message],
        timeout_s: float,
        max_bytes: float,
    ) -> None:
        self._ask, self._parse, self._timeout_s, self._max_bytes = ask, parse, timeout_s, max_bytes
        self.turn = asyncio.Lock()
        self.arrived: Message | None = None
        self.why_over = ""
        self._answers = self._refusals = self._counts = 0
        self._state = threading.Lock()
        self._waits: Future[Message] | None = None
        self._is_closed = False

    async def generate(self, question: Message) -> Answer:
        """Returns the model's next turn. Raises BadChat. The caller holds `turn`."""
        told = (await self._reply("chat", question))["answer"]
        self._answers += 1
        message = await asyncio.to_thread(self._parse, told, self._answers, question["tools"])
        return Answer(self._answers, message, told["finish"], told["tokens"])

    async def count(self, question: Message) -> int:
        """Returns the number of tokens before the turn that would answer a question. Raises BadChat. The caller holds
        `turn`.
        """
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
        if size > self._max_bytes:
            answer = {"over": f"the messages and tools have {size} bytes, more than agent.max_tokens can hold"}
        else:
            try:
                waits = await asyncio.to_thread(self._asked, kind, question)
                answer = await asyncio.wait_for(asyncio.wrap_future(waits), self._timeout_s)
            except TimeoutError:
                raise BadChat(f"the run did not respond within {self._timeout_s:g} s", status=504) from None
        if "ended" in answer:
            raise _ended()
        self._refusals += not {"answer", "count"} & answer.keys()
        if "over" in answer:
            self.why_over = answer["over"]
            raise BadChat(f"the model has no turns left: {answer['over']} ({OVER})", code="context_length_exceeded")
        if "refused" in answer:
            raise BadChat(answer["refused"], "messages")
        return answer

    def _asked(self, kind: str, question: Message) -> Future[Message]:
        waits: Future[Message] = Future()
        with self._state:
            if self._is_closed:
                raise _ended()
            self._waits = waits
            self._ask({kind: question})
            self.arrived = None
        return waits

    def answer(self, message: Message) -> None:
        """Receives rank 0's reply."""
        with self._state:
            if self._waits is not None and not self._waits.done():
                self._waits.set_result(message)

    def close(self) -> None:
        """Refuses all further requests."""
        self.answer({"ended": True})
        with self._state:
            self._is_closed = True


def _ended() -> BadChat:
    return BadChat("the trajectory of this key has ended", status=401, code="invalid_api_key")


class EndpointServer:
    """HTTP server of the endpoint, in a thread with its own event loop: programs may block the worker's loop.

    A connection is unauthenticated until it has sent the key of a running trajectory. Unauthenticated connections share
    MAX_UNAUTHENTICATED slots; each sends at most MAX_HEAD_BYTES within HEAD_S, and only the head of its request is
    read.
    """

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}  # the oldest first
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._most = MAX_UNAUTHENTICATED if most == resource.RLIM_INFINITY else min(MAX_UNAUTHENTICATED, most // 4)
        for name in ("no_proxy", "NO_PROXY"):  # clients must not use a proxy for this address
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), HOST)))
        listening = socket.create_server((HOST, 0), backlog=BACKLOG)
        self._port: int = listening.getsockname()[1]
        threading.Thread(target=lambda: asyncio.run(self._serve(listening)), daemon=True, name="endpoint").start()

    def open(self, session: Session) -> Endpoint:
        """Admits the session's requests with a new key."""
        key = secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = session
        return Endpoint(f"http://{HOST}:{self._port}/v1", key)

    def revoke(self, endpoint: Endpoint) -> None:
        """Revokes the endpoint's key."""
        if (session := self._sessions.pop(_digest(endpoint.key), None)) is not None:
            session.close()

    async def _serve(self, listening: socket.socket) -> None:
        # asyncio accepts `backlog` connections at a time: few, so that each is read before a flood makes it the oldest
        server = await asyncio.start_server(
            self._connection, sock=listening, limit=MAX_HEAD_BYTES, backlog=ACCEPT_BATCH
        )
        listening.listen(BACKLOG)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._unauthenticated[writer] = None
        if len(self._unauthenticated) > self._most:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # broken or slow connections are the client's problem
        finally:
            self._unauthenticated.pop(writer, None)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answers one request; returns True if the connection stays open."""
        limit_s = HEAD_S if writer in self._unauthenticated else IDLE_S
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), limit_s)).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, path, version = [*first.split(" "), "", ""][:3]
        stays = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        route = method, path.partition("?")[0]
        error_body = anthropic_messages.error_body if route[1].startswith(MESSAGES) else chat.error_body
        try:
            keys = headers.get("x-api-key", ""), headers.get("authorization", "").removeprefix("Bearer ").strip()
            found = [self._sessions[digest] for digest in map(_digest, keys) if digest in self._sessions]
            if not found:
                raise BadChat(
                    "the key belongs to no running trajectory: use ctx.endpoint.key", status=401, code="invalid_api_key"
                )
            self._unauthenticated.pop(writer, None)
            body = await _body(reader, writer, headers) if method == "POST" else b""
            if route == ("GET", MODELS):
                models = [{"id": chat.MODEL, "object": "model", "created": 0, "owned_by": "mrl"}]
                return await _reply(writer, HTTPStatus.OK, {"object": "list", "data": models}, stays)
            if route == ("POST", COUNT):
                return await self._count(found[0], body, reader, writer, stays)
            if method != "POST" or route[1] not in FORMS:
                known = f"POST {', '.join((*FORMS, COUNT))} or GET {MODELS}"
                raise BadChat(f"{method} {path} does not exist: use {known}", status=404)
            return await self._answer(found[0], FORMS[route[1]], body, reader, writer, stays)
        except BadChat as error:
            stays &= error.status not in (401, 411, 413)  # what else was sent is not read
            return await _reply(writer, error.status, error_body(error), stays)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            raise
        except Exception as error:  # from the user's parser: reported to the harness, and so to the run
            told = BadChat(f"{type(error).__name__}: {error}", status=500)
            return await _reply(writer, 500, error_body(told), False)

    async def _count(
        self, session: Session, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stays: bool
    ) -> bool:
        asked = _parsed(anthropic_messages, body)
        async with session.turn:
            if reader.at_eof():
                return False
            tokens = await session.count(asked.question)
        return await _reply(writer, HTTPStatus.OK, {"input_tokens": tokens}, stays)

    async def _answer(
        self,
        session: Session,
        form: Form,
        body: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stays: bool,
    ) -> bool:
        asked = _parsed(form, body)
        async with session.turn:  # each that has it waits at most `timeout_s`
            if reader.at_eof():  # a client that has given up, and has asked again
                return False
            answer = await session.generate(asked.question)
            if reader.at_eof():
                return False
            session.arrived = answer.message
            try:
                if asked.has_stream:
                    data = "".join(map(_event, form.events(answer, asked)))
                    return await _reply(writer, HTTPStatus.OK, data, stays, "text/event-stream")
                return await _reply(writer, HTTPStatus.OK, form.completion(answer, asked), stays)
            except (OSError, TimeoutError):
                session.arrived = None
                raise


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _parsed(form: Form, body: bytes) -> ChatRequest:
    try:
        value = strict_json.loads(body)
    except ValueError as error:
        raise BadChat(f"the body is not JSON: {error}") from None
    return form.parse_request(value)


def _event(event: Message | str) -> str:
    """Returns a server-sent event. An event with a type names it in front of its data too."""
    if isinstance(event, str):
        return f"data: {event}\n\n"
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {strict_json.dumps(event)}\n\n"


async def _body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: dict[str, str]) -> bytes:
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal()):
        raise BadChat("the header Content-Length is missing or not a number", status=411)
    if len(length) > 15 or int(length) > MAX_BODY_BYTES:
        raise BadChat(f"the body has {length[:20]} bytes; the limit is {MAX_BODY_BYTES}", status=413)
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await asyncio.wait_for(reader.readexactly(int(length)), IDLE_S)


async def _reply(
    writer: asyncio.StreamWriter, status: int, answer: Any, stays: bool, kind: str = "application/json"
) -> bool:
    """Sends an answer, which is text or a JSON value; returns `stays`."""
    data = (answer if isinstance(answer, str) else strict_json.dumps(answer)).encode()
    head = f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\n"
    head += f"Content-Length: {len(data)}\r\n" + ("" if stays else "Connection: close\r\n") + "\r\n"
    writer.write(head.encode() + data)
    await asyncio.wait_for(writer.drain(), IDLE_S)
    return stays
