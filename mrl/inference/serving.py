"""The HTTP side of an engine of mrl's own: its key, its endpoints, its refusals. It opens no door to strangers.

A program that answers `mrl.inference.protocol` needs a function an endpoint and `serve`.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mrl.ports import HERE

log = logging.getLogger(__name__)
KEY_VARIABLE = "MRL_ENGINE_KEY"  # in the server's environment: the key that every request must carry
STRANGER_S = 10.0  # how long one may take to show the key
MAX_STRANGERS = 1024  # connections that have not shown it; one more ends the oldest of them
MAX_HEAD_BYTES = 16 << 10  # of a request before its body: all that is read without the key

Route = Callable[[dict[str, Any]], Any]  # of the JSON body, {} where there is none; gives the JSON answer


class BadRequest(ValueError):
    """The caller's mistake: answered with 400 and this text."""


def serve(port: int, key: str, routes: Mapping[str, Route], host: str = HERE) -> None:
    """Answers on `host`:`port` until the process is ended, each request in a thread of its own.

    Every request must carry the key, as `Authorization: Bearer KEY`; what comes without it is not read, and answered
    401. A route's BadRequest and KeyError are answered 400, its other errors 500, with their text.

    routes: by path
    """
    server = Server(port, key, routes, host)
    log.info("serving on port %d", port)
    server.serve_forever()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer's head and body are two writes: the second would wait 40 ms
    timeout = STRANGER_S

    def setup(self) -> None:
        super().setup()
        self.rfile = self.head = _Head(self.rfile)

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        if self.command == "GET" and self.path == self.server.unlocked:
            self.close_connection = True
            return self._reply(200, {})
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.server.wanted):
            self.close_connection = True
            return self._reply(401, {"message": "Unauthorized"})
        self.server.let_in(self.connection)
        self.head.left = MAX_HEAD_BYTES
        self.connection.settimeout(None)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        endpoint = self.server.routes.get(self.path.partition("?")[0])
        if endpoint is None:
            return self._reply(404, {"message": f"no endpoint {self.path}"})
        try:
            status, answer = 200, endpoint(json.loads(data) if data else {})
        except (BadRequest, KeyError) as error:
            status, answer = 400, {"success": False, "message": str(error)}
        except Exception as error:
            log.exception("%s failed", self.path)
            status, answer = 500, {"success": False, "message": f"{type(error).__name__}: {error}"}
        self._reply(status, answer)

    def _reply(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:  # else the client would send its next request into the closing one
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # one line a request says nothing that the trainer does not know


class _Head(io.BufferedIOBase):
    """Reads what a connection sends. Lines, which only heads have, may have MAX_HEAD_BYTES together."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.left = inner, MAX_HEAD_BYTES

    def readline(self, limit: int | None = -1, /) -> bytes:
        line: bytes = self._inner.readline(self.left + 1)
        self.left -= len(line)
        if self.left < 0:
            raise ConnectionAbortedError(f"the head of a request has more than {MAX_HEAD_BYTES} bytes")
        return line

    def read(self, size: int | None = -1, /) -> bytes:
        found: bytes = self._inner.read(size)
        return found

    def close(self) -> None:
        self._inner.close()


class Server(ThreadingHTTPServer):
    """HTTP server for use in a thread: `serve_forever`, `shutdown`. It listens from its construction on; see `serve`.

    port: 0 for any that is free; `server_port` says which
    unlocked: path that a GET without the key is answered 200 at, with nothing
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, key: str, routes: Mapping[str, Route], host: str = HERE, unlocked: str = "") -> None:
        super().__init__((host, port), _Handler)
        self.wanted, self.routes, self.unlocked = f"Bearer {key}".encode(), routes, unlocked
        self._strangers: dict[socket.socket, float] = {}  # connection -> when it came, the oldest first
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Counts the connection as a stranger's, and ends the oldest of these if they are too many."""
        with self._lock:
            self._strangers[request] = time.monotonic()
            surplus = [*self._strangers][: len(self._strangers) - MAX_STRANGERS]
        self._drop(surplus)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends strangers that were given their time, twice a second."""
        came_by = time.monotonic() - STRANGER_S
        with self._lock:
            late = [request for request, came in self._strangers.items() if came < came_by]
        self._drop(late)

    def _drop(self, requests: list[socket.socket]) -> None:
        for request in requests:
            self.let_in(request)
            with contextlib.suppress(OSError):  # its thread reads the end then
                request.shutdown(socket.SHUT_RDWR)

    def let_in(self, request: socket.socket) -> None:
        """Counts the connection as a stranger's no more."""
        with self._lock:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        self.let_in(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not a connection that broke, ours or a stranger's: its end knows. The log is for what the engine did."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
