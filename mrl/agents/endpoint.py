"""An endpoint of OpenAI's kind in a worker process, for harnesses that are not written for mrl. The standard library
only. It listens on this machine alone; each trajectory has a key of its own, for as long as its program runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mrl.agents import chat
from mrl.agents.chat import BadChat, Message

HOST = "127.0.0.1"
MAX_REFUSALS = 32  # of one trajectory; then nothing is asked any more, and agent.step_timeout_s ends it
IDLE_S = 60.0  # of a connection without a request, and of one whose body does not come
MAX_BODY_BYTES = 64 << 20
CHAT, MODELS = "/v1/chat/completions", "/v1/models"


@dataclass(frozen=True)
class Endpoint:
    """What a program of one trajectory gives its harness: the address (`base_url`) and the key (`api_key`)."""

    url: str
    key: str = field(repr=False)

    @property
    def env(self) -> dict[str, str]:
        """The environment's variables of this process with them, for a harness that is a program of its own."""
        return {**os.environ, "OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": self.key}


class Session:
    """One trajectory's requests, one after the other. ask: sends a question to rank 0, which `answer` answers; parse:
    from the text of a turn to the message that it is; timeout_s: until rank 0 has answered

    arrived: the last answer, unless its harness was gone; has_ended_model: the model has no turn left
    """

    def __init__(
        self, ask: Callable[[Message], None], parse: Callable[[str, str, int], Message], timeout_s: float
    ) -> None:
        self._ask, self._parse, self._timeout_s = ask, parse, timeout_s
        self.turn = threading.Lock()
        self.arrived: Message | None = None
        self.has_ended_model = False
        self._answers = self._refusals = 0
        self._state = threading.Lock()
        self._waits: Future[Message] | None = None
        self._is_closed = False

    def generate(self, question: Message) -> tuple[int, Message, str, list[int]]:
        """Number, message, finish and tokens of the model's next turn. Raises BadChat. For who holds `turn`."""
        if self._refusals >= MAX_REFUSALS:
            raise BadChat(f"{MAX_REFUSALS} requests were refused: the harness is to end")
        waits: Future[Message] = Future()
        with self._state:
            if self._is_closed:
                raise _ended()
            self._waits = waits
            self._ask({"chat": question})
            self.arrived = None
        try:
            answer = waits.result(self._timeout_s)
        except CancelledError:
            raise _ended() from None
        except TimeoutError:
            raise BadChat(f"the run has not answered within {self._timeout_s:g} s", status=504) from None
        self._refusals += "answer" not in answer
        if "over" in answer:
            self.has_ended_model = True
            raise BadChat(f"the model has no turn left: {answer['over']}", code="context_length_exceeded")
        if "refused" in answer:
            raise BadChat(answer["refused"], "messages")
        told = answer["answer"]
        self._answers += 1
        return self._answers, self._parse(told["text"], told["finish"], self._answers), told["finish"], told["tokens"]

    def answer(self, message: Message) -> None:
        """What rank 0 says."""
        with self._state:
            if self._waits is not None and not self._waits.done():
                self._waits.set_result(message)

    def close(self) -> None:
        """Refuses what still comes."""
        with self._state:
            self._is_closed = True
            if self._waits is not None:
                self._waits.cancel()


def _ended() -> BadChat:
    return BadChat("the trajectory of this key has ended", status=401, code="invalid_api_key")


class Door(ThreadingHTTPServer):
    """Listens from here on, in a thread."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__((HOST, 0), _Handler)
        self._sessions: dict[bytes, Session] = {}
        for name in ("no_proxy", "NO_PROXY"):  # clients would look for the address elsewhere
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), HOST)))
        threading.Thread(target=self.serve_forever, daemon=True, name="endpoint").start()

    def open(self, session: Session) -> Endpoint:
        """Lets requests of the session in, by a new key."""
        key = secrets.token_urlsafe(32)
        self._sessions[_digest(key)] = session
        return Endpoint(f"http://{HOST}:{self.server_port}/v1", key)

    def shut(self, endpoint: Endpoint) -> None:
        """Its key opens nothing any more."""
        if (session := self._sessions.pop(_digest(endpoint.key), None)) is not None:
            session.close()

    def of(self, key: str) -> Session:
        """Raises BadChat for a key of no trajectory that runs."""
        if (session := self._sessions.get(_digest(key))) is None:
            raise BadChat("the key is of no trajectory that runs: ctx.endpoint.key", status=401, code="invalid_api_key")
        return session

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is the client's affair; what else fails is answered."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


class _Handler(BaseHTTPRequestHandler):
    server: Door
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_S

    def do_GET(self) -> None:
        self._attempt(self._get)

    def do_POST(self) -> None:
        self._attempt(self._post)

    def _attempt(self, serve: Callable[[Session], None]) -> None:
        try:
            serve(self.server.of(self.headers.get("Authorization", "").removeprefix("Bearer ").strip()))
        except BadChat as error:
            self.close_connection |= error.status in (401, 413)  # what else was sent is not read
            self._reply(error.status, error.body)
        except OSError:
            self.close_connection = True
        except Exception as error:  # of the user's parser: the harness, and so the run, hears of it
            self.close_connection = True
            self._reply(500, BadChat(f"{type(error).__name__}: {error}", status=500).body)

    def _get(self, session: Session) -> None:
        if self._path != MODELS:
            raise BadChat(f"there is no {self.path}: only {CHAT} and {MODELS}", status=404)
        models = [{"id": chat.MODEL, "object": "model", "created": 0, "owned_by": "mrl"}]
        self._reply(200, {"object": "list", "data": models})

    def _post(self, session: Session) -> None:
        body = self._body()
        if self._path != CHAT:
            raise BadChat(f"there is no {self.path}: only {CHAT} and {MODELS}", status=404)
        asked = chat.read(body)
        with session.turn:  # each who has it waits at most `timeout_s`
            if self._is_gone():  # a client that has given up, and has asked again
                self.close_connection = True
                return
            number, message, finish, tokens = session.generate(asked.question)
            if self._is_gone():
                self.close_connection = True
                return
            session.arrived = message
            try:
                if asked.has_stream:
                    self._stream(chat.events(number, message, finish, tokens, asked.with_usage))
                else:
                    self._reply(200, chat.completion(number, message, finish, tokens))
            except OSError:
                session.arrived = None
                raise

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            self.close_connection = True
            raise BadChat("Content-Length must say how long the body is", status=411)
        if int(length) > MAX_BODY_BYTES:
            raise BadChat(f"the body has {length} bytes, at most {MAX_BODY_BYTES} are read", status=413)
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise BadChat(f"the body is no JSON: {error}") from None

    def _is_gone(self) -> bool:
        """Whether the client has closed the connection."""
        with suppress(OSError):
            if not select.select([self.connection], [], [], 0)[0]:
                return False
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        return True

    def _reply(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self._head(status, "application/json", len(data))
        self.wfile.write(data)

    def _stream(self, events: Any) -> None:
        data = "".join(f"data: {event}\n\n" for event in events).encode()
        self._head(200, "text/event-stream", len(data))
        self.wfile.write(data)

    def _head(self, status: int, kind: str, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass
