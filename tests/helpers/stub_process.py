"""Engines that serve from threads of this process, and a pool of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from mrl.inference.access import Access
from mrl.inference.engine import Engine
from mrl.inference.engine_pool import EnginePool
from mrl.inference.server import Server
from mrl.inference.server_info import UNCHECKED
from mrl.inference.serving import Route
from mrl.inference.serving import Server as HttpServer

KEY = "sesame"


class _BreakingServer(HttpServer):
    """A server that closes the connection without an answer if a route raises ConnectionAbortedError."""

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        response = await super()._answer(request)
        if isinstance(response, web.Response) and "ConnectionAbortedError" in (response.text or ""):
            assert request.transport is not None
            request.transport.abort()
        return response


class StubProcess:
    """An engine as the pool sees it; a subclass defines how it generates. routes: additional routes"""

    name, log, is_gone = "engine", "engine.log", False

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self.restarts = 0
        self.http = _BreakingServer(0, KEY, {"/generate": self.generate, **routes})
        self.url = f"http://127.0.0.1:{self.http.port}"

    def generate(self, body: dict[str, Any]) -> Any:
        raise NotImplementedError

    def exit_code(self) -> int | None:
        return None

    def restart(self) -> None:
        self.restarts += 1

    def is_ready(self, timeout_s: float) -> bool:
        return True

    def exit_report(self) -> str:
        return ""

    def close(self) -> None:
        self.http.close()


@contextmanager
def start(
    processes: Sequence[StubProcess], *, concurrent_requests: int = 8, vocab_size: int = 9, timeout_s: float = 60.0
) -> Iterator[Engine]:
    servers = [Server(process.url, process) for process in processes]  # type: ignore[arg-type]
    pool = EnginePool(
        servers,
        Access(KEY),
        lambda url: (UNCHECKED, ()),
        startup_timeout_s=9.0,
        max_restarts=1,
        memory_timeout_s=9.0,
    )
    pool._ready = True
    engine = Engine(pool, vocab_size=vocab_size, concurrent_requests=concurrent_requests, request_timeout_s=timeout_s)
    yield engine
    engine.close_dispatcher()
