"""HTTP server of OpenAI's and Anthropic's APIs in a worker process, for harnesses that are not written for mrl.

It listens on this machine only; each trajectory has its own key while its program runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import secrets
from collections.abc import Iterable
from typing import Any, Protocol

from aiohttp import web

from mrl import strict_json
from mrl.agents import anthropic_messages, chat, openai_responses
from mrl.agents.chat import Answer, BadChat, ChatRequest, Message
from mrl.agents.endpoint import Endpoint, Session
from mrl.http_server import IDLE_S, HttpServer, closing, read_body
from mrl.ports import HERE

MAX_BODY_BYTES = 64 << 20
MODELS, MESSAGES, COUNT = "/v1/models", "/v1/messages", "/v1/messages/count_tokens"


class Form(Protocol):
    """Form of an API: a module that translates its requests and answers."""

    def parse_request(self, body: Any) -> ChatRequest: ...

    def completion(self, answer: Answer, asked: ChatRequest) -> Message: ...

    def events(self, answer: Answer, asked: ChatRequest) -> Iterable[Message | str]: ...


FORMS: dict[str, Form] = {"/v1/chat/completions": chat, MESSAGES: anthropic_messages, "/v1/responses": openai_responses}


class EndpointServer:
    """HTTP server of the endpoint, in a thread with its own event loop: programs may block the worker's loop."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, Session] = {}
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        for name in ("no_proxy", "NO_PROXY"):  # clients must not use a proxy for this address
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), HERE)))
        self._server = HttpServer(self._respond)

    def open(self, session: Session) -> Endpoint:
        """Admits the session's requests with a new key."""
        key = secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = session
        return Endpoint(f"http://{HERE}:{self._server.port}/v1", key)

    def revoke(self, endpoint: Endpoint) -> None:
        """Revokes the endpoint's key."""
        if (session := self._sessions.pop(_digest(endpoint.key), None)) is not None:
            session.close()

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        error_body = anthropic_messages.error_body if request.path.startswith(MESSAGES) else chat.error_body
        try:
            return await self._answer(request)
        except BadChat as error:
            answer = _json(error_body(error), error.status)
            return closing(answer) if error.status in (401, 413) else answer  # what else was sent is not read
        except Exception as error:  # from the user's parser: reported to the harness, and so to the run
            told = BadChat(f"{type(error).__name__}: {error}", status=500)
            return closing(_json(error_body(told), 500))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        keys = request.headers.get("X-Api-Key", ""), request.headers.get("Authorization", "").removeprefix("Bearer ")
        session = next((self._sessions[one] for one in map(_digest, keys) if one in self._sessions), None)
        if session is None:
            why = "the key belongs to no running trajectory: use ctx.endpoint.key"
            raise BadChat(why, status=401, code="invalid_api_key")
        self._server.authenticated(request)
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise BadChat(f"the body has {request.content_length} bytes; the limit is {MAX_BODY_BYTES}", status=413)
        body = await read_body(request)
        route = request.method, request.path
        if route == ("GET", MODELS):
            models = [{"id": chat.MODEL, "object": "model", "created": 0, "owned_by": "mrl"}]
            return _json({"object": "list", "data": models})
        if request.method != "POST" or request.path not in (*FORMS, COUNT):
            known = f"POST {', '.join((*FORMS, COUNT))} or GET {MODELS}"
            raise BadChat(f"{request.method} {request.path} does not exist: use {known}", status=404)
        form = FORMS.get(request.path, anthropic_messages)
        try:
            value = strict_json.loads(bytes(body))
        except ValueError as error:
            raise BadChat(f"the body is not JSON: {error}") from None
        asked = form.parse_request(value)
        async with session.turn:  # each that has it waits at most `timeout_s`
            _check_connected(request)
            if request.path == COUNT:
                return _json({"input_tokens": await session.count(asked.question)})
            answer = await session.generate(asked.question)
            _check_connected(request)
            session.arrived = answer.message
            try:
                return await _send(request, form, answer, asked)
            except (OSError, TimeoutError):
                session.arrived = None
                raise


def _check_connected(request: web.BaseRequest) -> None:
    """Raises ConnectionResetError if the client has given up, and perhaps asked again."""
    if request.transport is None or request.transport.is_closing():
        raise ConnectionResetError


async def _send(request: web.BaseRequest, form: Form, answer: Answer, asked: ChatRequest) -> web.StreamResponse:
    """Sends an answer to a chat. Raises OSError or TimeoutError if the client does not take it."""
    if asked.has_stream:
        events = "".join(map(_event, form.events(answer, asked)))
        response = web.Response(text=events, content_type="text/event-stream")
    else:
        response = _json(form.completion(answer, asked))
    await response.prepare(request)
    await asyncio.wait_for(response.write_eof(), IDLE_S)
    return response


def _json(answer: Any, status: int = 200) -> web.Response:
    return web.Response(text=strict_json.dumps(answer), status=status, content_type="application/json")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _event(event: Message | str) -> str:
    """Returns a server-sent event. An event with a type names it in front of its data too."""
    if isinstance(event, str):
        return f"data: {event}\n\n"
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {strict_json.dumps(event)}\n\n"
