"""What a node's first rank does for the engines of its node: starts and ends them, and lets rank 0, on another node,
ask after them and have them started again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.ports import HERE
from mrl.rollout.errors import EngineStartError, EngineUnavailable
from mrl.rollout.process import EngineProcess
from mrl.rollout.serving import BadRequest, Route, Server

LOOK_S = 0.1
LONGEST_LOOK_S = 30.0
ENDED, READY, OBITUARY, END, RESTART = "/ended", "/ready", "/obituary", "/end", "/restart"


@dataclass(frozen=True)
class Home:
    """A node, as its engines need to know it.

    node: its number, of the launcher there
    host: the address that its engines listen on: the node's own where another one must reach them
    """

    node: int = 0
    host: str = HERE


@dataclass(frozen=True)
class Offered:
    """The engines of a node, to whom another node's rank 0 is told of them. Names, addresses and logs: one an engine.

    where: the node in words; agent: the address of who answers for them
    """

    node: int
    where: str
    agent: str
    names: tuple[str, ...]
    urls: tuple[str, ...]
    logs: tuple[str, ...]


class Agent:
    """Answers for a node's engines, in threads of this process, until `close`, which ends them. Whoever asks must have
    the run's key."""

    def __init__(self, home: Home, where: str, engines: Sequence[EngineProcess], key: str) -> None:
        self._engines, self._home, self._where = engines, home, where
        self._lives = [0] * len(engines)  # restarts of each: an exit code is of one life
        self._closed = False
        routes: dict[str, Route] = {
            ENDED: self._ended,
            READY: lambda body: self._attempt(lambda: self._of(body).is_ready(body["timeout_s"])),
            OBITUARY: lambda body: self._attempt(self._of(body).obituary),
            END: lambda body: self._attempt(self._of(body).close),
            RESTART: lambda body: self._attempt(lambda: self._restart(body)),
        }
        self._server = Server(0, key, routes, home.host)
        threading.Thread(target=self._server.serve_forever, args=(LOOK_S,), daemon=True, name="engines' agent").start()

    @property
    def offered(self) -> Offered:
        """What rank 0 needs to know."""
        return Offered(
            self._home.node,
            self._where,
            f"http://{self._home.host}:{self._server.server_port}",
            tuple(engine.name for engine in self._engines),
            tuple(engine.url for engine in self._engines),
            tuple(str(engine.log) for engine in self._engines),
        )

    def is_ready(self, timeout_s: float) -> bool:
        """Whether all its engines answer. Raises EngineStartError, as `EngineProcess.is_ready`."""
        return all(engine.is_ready(timeout_s) for engine in self._engines)

    def obituary(self) -> str | None:
        """Of an engine that has ended; None while there is none."""
        return next((engine.obituary() for engine in self._engines if engine.exit_code() is not None), None)

    def close(self) -> None:
        """Ends the engines."""
        self._closed = True
        self._server.shutdown()
        self._server.server_close()
        for engine in self._engines:
            engine.close()

    def _check_open(self) -> None:
        """A connection that was kept alive outlives `close`."""
        if self._closed:
            raise BadRequest(f"{self._where} has ended its engines")

    def _of(self, body: dict[str, Any]) -> EngineProcess:
        self._check_open()
        index = body["engine"]
        if not isinstance(index, int) or not 0 <= index < len(self._engines):
            raise BadRequest(f"no engine {index!r} on {self._where}")
        return self._engines[index]

    def _restart(self, body: dict[str, Any]) -> int:
        self._of(body).restart()
        self._lives[body["engine"]] += 1
        return self._lives[body["engine"]]

    def _ended(self, body: dict[str, Any]) -> Any:
        """[restarts, exit code] of every engine: as soon as they are not those that the caller has `seen`, or after
        `wait_s`."""
        self._check_open()
        end = time.monotonic() + min(float(body["wait_s"]), LONGEST_LOOK_S)
        while (lives := self._looked()) == body["seen"] and time.monotonic() < end and not self._closed:
            time.sleep(LOOK_S)
        return {"lives": lives}

    def _looked(self) -> list[list[int | None]]:
        return [[life, engine.exit_code()] for life, engine in zip(self._lives, self._engines)]

    @staticmethod
    def _attempt(ask: Callable[[], Any]) -> dict[str, Any]:
        """What is wrong with an engine is for the caller, as the error that it is."""
        try:
            return {"value": ask()}
        except (EngineStartError, EngineUnavailable) as error:
            return {"error": str(error), "kind": type(error).__name__}
