"""HTTP server on aiohttp, in an event loop of its own thread, whose requests need a key.

Connections that have not shown a valid key are limited in number and time, and of their requests only the head is read:
another account of the machine cannot exhaust the server's memory or file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from aiohttp import web

from mrl.ports import HERE
from mrl.workers.event_loop import EventLoopThread

T = TypeVar("T")
MAX_UNAUTHENTICATED = 1000  # connections without a valid key, or a quarter of the files that the process may open
HEAD_S = 10.0  # until a new connection has sent a valid key
IDLE_S = 60.0  # until a connection with a key sends its next request, or the next part of a body
MAX_FIELD_BYTES, MAX_FIELDS = 4 << 10, 64  # of the head of a request
ACCEPT_BATCH = 16
BACKLOG = 1024  # connections that the kernel keeps until they are accepted
START_S = 30.0  # until the event loop accepts connections
CLOSE_S = 0.1  # for requests in progress

_quiet = logging.getLogger("mrl.http_server.connections")  # broken heads and connections are the client's problem
_quiet.propagate = False
_quiet.addHandler(logging.NullHandler())

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpServer:
    """Listens on host:port from its construction until `close`. port: 0 for any that is free. Raises OSError.

    handle: answers a request; it calls `authenticated` before it reads the body
    """

    def __init__(self, handle: Handler, port: int = 0, host: str = HERE) -> None:
        self._listening = socket.create_server((host, port), backlog=BACKLOG)
        self.port: int = self._listening.getsockname()[1]
        self._handle = handle
        self._unauthenticated: dict[object, asyncio.Transport] = {}  # by protocol, the oldest first
        self._loop = EventLoopThread(f"http server, port {self.port}", RuntimeError("the server is closed"))
        started: Future[None] = Future()
        self._loop.submit(self._serve(started))
        try:
            started.result(START_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections. Safe to call twice."""
        self._loop.close()
        self._listening.close()

    def authenticated(self, request: web.BaseRequest) -> None:
        """Lifts the limits of the request's connection."""
        self._unauthenticated.pop(request.protocol, None)

    async def _serve(self, started: Future[None]) -> None:
        server = _Connections(
            self._unauthenticated,
            self._handle,
            keepalive_timeout=IDLE_S,
            lingering_time=0,
            auto_decompress=False,
            access_log=None,
            logger=_quiet,
            max_line_size=MAX_FIELD_BYTES,
            max_field_size=MAX_FIELD_BYTES,
            max_headers=MAX_FIELDS,
        )
        runner = web.ServerRunner(server, shutdown_timeout=CLOSE_S)
        try:
            await runner.setup()
            # asyncio accepts `backlog` connections at a time: few, so that each is read before a flood makes it the
            # oldest
            await web.SockSite(runner, self._listening, backlog=ACCEPT_BATCH).start()
            self._listening.listen(BACKLOG)
            started.set_result(None)
            await asyncio.Event().wait()
        except Exception as error:
            started.set_exception(error)
        finally:
            await runner.cleanup()


class _Connections(web.Server):
    """Ends connections that have no valid key for too long, or are too many."""

    def __init__(self, unauthenticated: dict[object, asyncio.Transport], handle: Handler, **settings: Any) -> None:
        super().__init__(handle, **settings)
        self._unauthenticated = unauthenticated
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MAX_UNAUTHENTICATED if files == resource.RLIM_INFINITY else min(MAX_UNAUTHENTICATED, files // 4)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._unauthenticated[handler] = transport
        asyncio.get_running_loop().call_later(HEAD_S, self._drop, handler)
        if len(self._unauthenticated) > self._most:
            self._drop(next(iter(self._unauthenticated)))

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        self._unauthenticated.pop(handler, None)
        super().connection_lost(handler, exc)

    def _drop(self, handler: object) -> None:
        if (transport := self._unauthenticated.pop(handler, None)) is not None:
            transport.abort()


async def read_body(request: web.BaseRequest) -> bytearray:
    """Returns the body. Raises TimeoutError if no part of it arrives for IDLE_S."""
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # nothing of the answer has been sent
    body = bytearray()
    while part := await asyncio.wait_for(request.content.readany(), IDLE_S):
        body += part
    return body


def closing(response: web.StreamResponse) -> web.StreamResponse:
    """Returns a response after which the connection ends, for a request that was not read to its end."""
    response.force_close()
    return response


async def in_thread(work: Callable[[], T]) -> T:
    """Returns the result of `work`, which may block, in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.cancelled():
            set_outcome(outcome)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = done.set_result, work()
        except Exception as error:
            outcome = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=run, daemon=True).start()
    return await done
