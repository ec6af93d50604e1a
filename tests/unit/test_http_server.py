"""The HTTP server: a failure of its event loop is an error of its constructor."""

from __future__ import annotations

import socket

import pytest
from aiohttp import web

from mrl.http_server import HttpServer
from mrl.inference.serving import Server


def test_a_server_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(site: web.SockSite) -> None:
        raise OSError("no more files")

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    monkeypatch.setattr(web.SockSite, "start", fails)
    with pytest.raises(OSError, match="no more files"):
        HttpServer(answer)


def test_a_closed_server_frees_its_port() -> None:
    with Server(0, "key", {}) as server:
        port = server.port
    server.close()
    with socket.create_server(("127.0.0.1", port)):
        pass
