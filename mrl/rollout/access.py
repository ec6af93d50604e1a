"""What opens the engines of a run, and what is looked at before it is shown."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import urlsplit

import httpx

from mrl.ports import HERE, is_here
from mrl.rollout.errors import EngineError
from mrl.rollout.listener import listeners


@dataclass(frozen=True)
class Access:
    """What opens the engines of a run, the same for all of them.

    api_key: sent with every request; None: they want none
    ours: mrl started them, so that what listens there on this machine without being this account's is a stranger
    """

    api_key: str | None = field(default=None, repr=False)
    ours: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def check(self, url: str, endpoint: str) -> None:
        """Before anything is sent: raises EngineError if a stranger has taken the engine's port."""
        parts = urlsplit(url)
        host = parts.hostname or HERE
        if not self.ours or not is_here(host):
            return
        for listener in listeners(parts.port or 0, host):
            if listener.user != os.geteuid():
                text = f"not asked: a process of user {listener.user} listens there, it is no engine of this run"
                raise EngineError(url, endpoint, None, text)


OPEN = Access()


@cache
def tls() -> ssl.SSLContext:
    """Of every connection. Reading the certificates takes 20 ms and 1 MiB: once a process, not once an engine."""
    return httpx.create_ssl_context(trust_env=False)
