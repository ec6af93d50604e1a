"""The HTTP side of an engine of mrl's own: its key, its endpoints, its refusals. It opens no door to strangers.

A program that answers `mrl.rollout.protocol` needs a function an endpoint and `serve`.
"""

from __future__ import annotations

import hmac
import json
import logging
import sys
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mrl.ports import HERE

log = logging.getLogger(__name__)
KEY_VARIABLE = "MRL_ENGINE_KEY"  # in the server's environment: the key that every request must carry
STRANGER_S = 10.0  # how long one may take to show the key

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

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.server.wanted):
            self.close_connection = True
            return self._reply(401, {"message": "Unauthorized"})
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


class Server(ThreadingHTTPServer):
    """As `serve`, for who runs it in a thread of its own: `serve_forever`, `shutdown`. It listens from here on.

    port: 0 for any that is free; `server_port` says which
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, key: str, routes: Mapping[str, Route], host: str = HERE) -> None:
        super().__init__((host, port), _Handler)
        self.wanted, self.routes = f"Bearer {key}".encode(), routes

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not a connection that broke, ours or a stranger's: its end knows. The log is for what the engine did."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)
