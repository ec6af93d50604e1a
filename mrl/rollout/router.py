"""`sglang-router`: one address before several engines. It is asked which they are, and they are used themselves:
weights, flushes and checksums that go through it would reach one of them, and nobody knows which."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from mrl.rollout.access import Access
from mrl.rollout.client import EngineClient
from mrl.rollout.errors import EngineStartError

ASKED_AT_ONCE = 64
ANSWER_S = 5.0


def engines_at(urls: Sequence[str], access: Access) -> dict[str, str]:
    """Returns the engines at these addresses and behind those that are routers, in order, each with the one of `urls`
    that it was found by. An address that does not answer yet counts as an engine's.

    Raises EngineStartError for a router without engines, with what is no address, or with one that is named elsewhere.
    """
    urls = [url.rstrip("/") for url in urls]
    found: dict[str, str] = {}
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        for url, engines in zip(urls, pool.map(lambda url: _at(url, access), urls)):
            for engine in engines:
                if engine in found:
                    where = " and ".join(dict.fromkeys((found[engine], url)))
                    raise EngineStartError(f"rollout.urls: {engine}: there twice, by itself or behind routers: {where}")
                found[engine] = url
    return found


def _at(url: str, access: Access) -> list[str]:
    with contextlib.closing(EngineClient(url, ANSWER_S, access)) as client:
        behind = client.workers()
    if behind is None:
        return [url]
    if not behind:
        raise EngineStartError(f"{url} is a router without engines: start them first, or name them in rollout.urls")
    for engine in behind:
        parts = urlsplit(engine)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in engine:
            raise EngineStartError(
                f"the router {url} names {engine!r}, which is not an address such as http://host:30000"
            )
    return [engine.rstrip("/") for engine in behind]
