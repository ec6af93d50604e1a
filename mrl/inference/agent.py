"""The agent of a node's engines: starts and ends them, and lets rank 0 on another node check and restart them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mrl.inference.errors import EngineStartError, EngineUnavailable
from mrl.inference.process import Started
from mrl.inference.serving import BadRequest, Route, Server
from mrl.ports import HERE

LOOK_S = 0.1
LONGEST_LOOK_S = 30.0
HEALTH, END_OF_RUN = "/health", "/end_of_run"
ENDED, READY, EXIT_REPORT, END, RESTART = "/ended", "/ready", "/exit_report", "/end", "/restart"


@dataclass(frozen=True)
class Home:
    """Node of some engines.

    node: number of the node
    host: address on which its engines listen; the node's own if other nodes must reach them
    """

    node: int = 0
    host: str = HERE


@dataclass(frozen=True)
class Offered:
    """Description of a node's engines for rank 0 on another node: name, address and log of each engine.

    where: name of the node, for messages; agent: address of the node's agent
    """

    node: int
    where: str
    agent: str
    names: tuple[str, ...]
    urls: tuple[str, ...]
    logs: tuple[str, ...]


class Agent:
    """HTTP server through which rank 0 checks and restarts a node's engines; `close` ends the engines. Requests need
    the run's key, except `/health`.

    run_is_over: the run has made its last step
    """

    def __init__(self, home: Home, where: str, engines: Sequence[Started], key: str) -> None:
        self._home, self._where = home, where
        self.add(engines)
        self.run_is_over = self._is_leaving = self._closed = False
        calls: dict[str, Callable[[Started, dict[str, Any]], Any]] = {
            READY: lambda engine, body: engine.is_ready(body["timeout_s"]),
            EXIT_REPORT: lambda engine, body: engine.exit_report(),
            END: lambda engine, body: _end(engine),
            RESTART: self._restart,
        }
        routes: dict[str, Route] = {path: partial(self._call, call) for path, call in calls.items()}
        routes |= {ENDED: self._ended, END_OF_RUN: self._end_of_run}
        self._server = Server(0, key, routes, home.host, unlocked=HEALTH)

    def add(self, engines: Sequence[Started]) -> None:
        """Sets the engines."""
        self._restarts = [0] * len(engines)  # of each: an exit code belongs to one start
        self._engines = engines

    @property
    def offered(self) -> Offered:
        """Description of this node's engines for rank 0."""
        return Offered(
            self._home.node,
            self._where,
            f"http://{self._home.host}:{self._server.port}",
            tuple(engine.name for engine in self._engines),
            tuple(engine.url for engine in self._engines),
            tuple(str(engine.log) for engine in self._engines),
        )

    def is_ready(self, timeout_s: float) -> bool:
        """Returns True if all its engines respond. Raises EngineStartError, as `EngineProcess.is_ready`."""
        return all(engine.is_ready(timeout_s) for engine in self._engines)

    def exit_report(self) -> str | None:
        """Returns the report of an engine that has ended; None while all run."""
        return next((engine.exit_report() for engine in self._engines if engine.exit_code() is not None), None)

    def leave(self) -> None:
        """Reports that the node is about to end."""
        self._is_leaving = True

    def close(self) -> None:
        """Ends the engines."""
        self._is_leaving = self._closed = True
        self._server.close()
        for engine in self._engines:
            _end(engine)

    def _check_open(self) -> None:
        """Raises BadRequest after `close`: requests in progress outlive it."""
        if self._closed:
            raise BadRequest(f"{self._where} has ended its engines")

    def _call(self, call: Callable[[Started, dict[str, Any]], Any], body: dict[str, Any]) -> dict[str, Any]:
        """Calls a function for one engine; returns its errors to rank 0, which raises them again."""
        self._check_open()
        index = body["engine"]
        if not isinstance(index, int) or not 0 <= index < len(self._engines):
            raise BadRequest(f"no engine {index!r} on {self._where}")
        try:
            return {"value": call(self._engines[index], body)}
        except (EngineStartError, EngineUnavailable) as error:
            return {"error": str(error), "kind": type(error).__name__}

    def _restart(self, engine: Started, body: dict[str, Any]) -> int:
        engine.restart()
        self._restarts[body["engine"]] += 1
        return self._restarts[body["engine"]]

    def _end_of_run(self, body: dict[str, Any]) -> Any:
        self.run_is_over = True
        return {}

    def _ended(self, body: dict[str, Any]) -> Any:
        """Returns [restarts, exit code] of every engine as soon as they differ from those that the caller has `seen`,
        the node leaves, or `wait_s` is over."""
        self._check_open()
        end = time.monotonic() + min(float(body["wait_s"]), LONGEST_LOOK_S)
        while True:
            exits = [[restarts, engine.exit_code()] for restarts, engine in zip(self._restarts, self._engines)]
            if exits != body["seen"] or time.monotonic() >= end or self._is_leaving:
                return {"exits": exits, "is_leaving": self._is_leaving}
            time.sleep(LOOK_S)


def _end(engine: Started) -> None:
    for process in engine.here:
        process.close()
