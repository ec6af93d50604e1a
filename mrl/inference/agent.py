"""Engines of other nodes, and engines over several nodes.

A node's agent starts and ends its engines, and answers for them over HTTP; rank 0, which is on another node, checks
and restarts them through it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from mrl.inference.access import Access, tls
from mrl.inference.errors import EngineStartError, EngineUnavailable, PortTaken, RolloutError
from mrl.inference.process import FORMER_ENGINE_S, GRACE_S, EngineProcess, Started
from mrl.inference.serving import BadRequest, Route, Server
from mrl.ports import HERE

POLL_S = 0.1
CONNECT_S = 10.0
ANSWER_S = 30.0  # more than one check of an engine takes
RESTART_S = FORMER_ENGINE_S + GRACE_S + ANSWER_S
LOOK_S = 10.0  # that a question after ended engines is left open
LONGEST_LOOK_S = 30.0
UNANSWERED = 2  # questions in a row after which a node that may leave has left
KINDS = (EngineStartError, PortTaken, EngineUnavailable)  # errors that rank 0 raises again
HEALTH, END_OF_RUN = "/health", "/end_of_run"
ENDED, READY, EXIT_REPORT, END, RESTART = "/ended", "/ready", "/exit_report", "/end", "/restart"


@dataclass(frozen=True)
class Home:
    """Node of some engines."""

    node: int = 0  # its number
    host: str = HERE  # address on which its engines listen; the node's own if other nodes must reach them


@dataclass(frozen=True)
class Offered:
    """Description of a node's engines for rank 0 on another node: name, address and log of each engine."""

    node: int
    where: str  # name of the node, for messages
    agent: str  # address of the node's agent
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
        engines = [(engine.name, engine.url, str(engine.log)) for engine in self._engines]
        names, urls, logs = zip(*engines) if engines else ((), (), ())
        return Offered(self._home.node, self._where, f"http://{self._home.host}:{self._server.port}", names, urls, logs)

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
        except KINDS as error:
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
            time.sleep(POLL_S)


def _end(engine: Started) -> None:
    for process in engine.here:
        process.close()


class OtherNode:
    """Another node with engines, which its first rank or `mrl serve` has started.

    silence_s: seconds without an answer after which the node counts as gone; None if the run needs the node
    Methods raise RolloutError, with the node's name, if the agent does not answer in time.
    """

    def __init__(self, offered: Offered, access: Access, *, silence_s: float | None = None) -> None:
        self.offered, self._silence_s = offered, silence_s
        self.is_gone = False
        self.exits: list[list[int | None]] = [[0, None] for _ in offered.urls]  # restarts and exit code of each engine
        self._http = httpx.Client(base_url=offered.agent, headers=access.headers, trust_env=False, verify=tls())
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name=f"engines of {offered.where}").start()

    @property
    def engines(self) -> list[ElsewhereEngine]:
        return [ElsewhereEngine(self, index) for index in range(len(self.offered.urls))]

    def ask(self, path: str, limit_s: float, **body: Any) -> Any:
        """Returns the agent's answer. Raises the error that the request raised there."""
        try:
            reply = self._http.post(path, json=body, timeout=httpx.Timeout(limit_s, connect=CONNECT_S))
            answer = reply.json()
            if reply.status_code != 200:
                raise ValueError(f"HTTP {reply.status_code}: {answer.get('message', answer)}")
        except (httpx.HTTPError, ValueError) as error:
            what = f"{path.removeprefix('/')} within {limit_s:g} s: {type(error).__name__}: {error}"
            raise RolloutError(f"{self.offered.where}: nobody answers for its engines: {what}") from error
        for kind in KINDS:
            if answer.get("kind") == kind.__name__:
                raise kind(f"{self.offered.where}: {answer['error']}")
        return answer

    def end_of_run(self) -> None:
        self.ask(END_OF_RUN, ANSWER_S)

    def close(self) -> None:
        """Ends communication with the node, which ends its engines itself."""
        self._is_closed.set()
        self._http.close()

    def _watch(self) -> None:
        """Keeps `exits` and `is_gone` current. The loss of a node with ranks is left to the heartbeats of the ranks."""
        look_s = LOOK_S if self._silence_s is None else min(LOOK_S, self._silence_s / 3)
        limit_s = look_s + ANSWER_S if self._silence_s is None else self._silence_s
        unanswered, answered = 0, time.monotonic()
        while not self._is_closed.is_set() and not self.is_gone:
            try:
                answer = self.ask(ENDED, limit_s, seen=self.exits, wait_s=look_s)
                self.exits, unanswered, answered = answer["exits"], 0, time.monotonic()
                self.is_gone = self._silence_s is not None and answer["is_leaving"]
            except RuntimeError:
                unanswered += 1
                if self._silence_s is not None:
                    self.is_gone = unanswered >= UNANSWERED or time.monotonic() - answered > self._silence_s
                self._is_closed.wait(1.0)


class ElsewhereEngine(Started):
    """An engine of another node, checked and restarted through its node's agent."""

    def __init__(self, node: OtherNode, index: int) -> None:
        self._node, self._index = node, index
        self._restarts = 0
        offered = node.offered
        self.name = f"{offered.names[index]} on {offered.where}"
        self.url, self.log = offered.urls[index], Path(offered.logs[index])

    @property
    def is_gone(self) -> bool:
        return self._node.is_gone

    def exit_code(self) -> int | None:
        restarts, code = self._node.exits[self._index]
        return code if restarts == self._restarts else None

    def is_ready(self, timeout_s: float) -> bool:
        return bool(self._node.ask(READY, ANSWER_S, engine=self._index, timeout_s=timeout_s)["value"])

    def close(self) -> None:
        self._node.ask(END, RESTART_S, engine=self._index)

    def restart(self) -> None:
        self._restarts = int(self._node.ask(RESTART, RESTART_S, engine=self._index)["value"])

    def exit_report(self) -> str:
        try:
            return str(self._node.ask(EXIT_REPORT, ANSWER_S, engine=self._index)["value"])
        except RolloutError as error:
            return str(error)


Member = EngineProcess | ElsewhereEngine


class SpreadEngine(Started):
    """Engine over several nodes, whose parts end and restart together.

    parts: on this node or others; the first one answers requests
    """

    def __init__(self, parts: Sequence[Member]) -> None:
        self._parts, first = parts, parts[0]
        self.name, self.url, self.log = f"{first.name} and {len(parts) - 1} more", first.url, first.log

    @property
    def is_gone(self) -> bool:
        return any(part.is_gone for part in self._parts)

    @property
    def here(self) -> list[EngineProcess]:
        return [process for part in self._parts for process in part.here]

    def exit_code(self) -> int | None:
        return next((code for part in self._parts if (code := part.exit_code()) is not None), None)

    def is_ready(self, timeout_s: float) -> bool:
        # the first part responds once all parts are there; it would wait for one that has ended
        return all(part.is_ready(timeout_s) for part in reversed(self._parts))

    def restart(self) -> None:
        with ThreadPoolExecutor(len(self._parts)) as pool:  # all end before one starts: no old and new part meet
            for step in (lambda part: part.close(), lambda part: part.restart()):
                list(pool.map(step, self._parts))

    def exit_report(self) -> str:
        ended = next((part for part in self._parts if part.exit_code() is not None), self._parts[0])
        return ended.exit_report()


def joined(parts: Sequence[Member], nodes: int) -> list[Started]:
    """Returns the engines made of `parts`, each over `nodes` nodes. parts: in the order of their nodes"""
    if nodes == 1:
        return [*parts]
    return [SpreadEngine(parts[first : first + nodes]) for first in range(0, len(parts), nodes)]
