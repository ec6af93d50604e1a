"""HTTP server of an engine written for mrl: its key, its endpoints, its refusals.

A program that answers `mrl.inference.protocol` needs a function for each endpoint, and `serve`.
"""

from __future__ import annotations

import hmac
import json
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiohttp import web

from mrl.http_server import HttpServer, closing, in_thread, read_body
from mrl.ports import HERE

log = logging.getLogger(__name__)
KEY_VARIABLE = "MRL_ENGINE_KEY"  # in the server's environment: the key that every request must carry

Route = Callable[[dict[str, Any]], Any]  # receives the JSON body, {} if there is none; returns the JSON answer


class BadRequest(ValueError):
    """Raised for a mistake of the caller; answered with 400 and this text."""


def serve(port: int, key: str, routes: Mapping[str, Route], host: str = HERE) -> None:
    """Answers on `host`:`port` until the process ends, each request in its own thread.

    Every request must carry the key, as `Authorization: Bearer KEY`; the body of one without it is not read, and the
    answer is 401. BadRequest and KeyError of a route are answered with 400, its other errors with 500, with their text.

    routes: by path
    """
    with Server(port, key, routes, host) as server:
        log.info("serving on port %d", server.port)
        threading.Event().wait()


class Server(HttpServer):
    """Server of `serve`, which runs until `close`.

    unlocked: path at which a GET without the key is answered with 200 and an empty object
    """

    def __init__(self, port: int, key: str, routes: Mapping[str, Route], host: str = HERE, unlocked: str = "") -> None:
        self.wanted, self.routes, self.unlocked = f"Bearer {key}".encode(), routes, unlocked
        super().__init__(self._answer, port, host)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and request.path == self.unlocked:
            return closing(web.json_response({}))
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.wanted):
            return closing(web.json_response({"message": "Unauthorized"}, status=401))
        self.authenticated(request)
        data = await read_body(request)
        route = self.routes.get(request.path)
        if route is None:
            return web.json_response({"message": f"no endpoint {request.path}"}, status=404)
        try:
            text = await in_thread(partial(_call, route, data))
            return web.Response(text=text, content_type="application/json")
        except (BadRequest, KeyError) as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        except Exception as error:
            log.exception("%s failed", request.path)
            return web.json_response({"success": False, "message": f"{type(error).__name__}: {error}"}, status=500)


def _call(route: Route, data: bytearray) -> str:
    return json.dumps(route(json.loads(data) if data else {}))
