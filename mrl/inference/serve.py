"""Engine node of `mrl serve`: starts its engines and registers them with the run's router."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from mrl.config.derived import Machine
from mrl.config.schema import RLConfig
from mrl.inference.access import Access
from mrl.inference.agent import Agent, Home, OtherNode, joined
from mrl.inference.errors import EngineStartError, RolloutError
from mrl.inference.launch import Part, started_with
from mrl.inference.membership import ListedNode, NodeRecord, RouterClient, engines_key, router_file, served
from mrl.inference.start import start_servers
from mrl.ports import free_port

LOOK_S = 0.5
LEAVING_S = 1.0  # between the notice that a node leaves and the end of its engines
STAY_S = 30.0  # beyond the run's own limit for saving
WARNING = signal.SIGUSR1


class Reason(StrEnum):
    """Why a node ends, other than by a signal that ends it at once."""

    RUN_IS_OVER = "the run has made its last step"
    NO_RUN = "there has been no run for placement.away_s"
    PREEMPTED = "asked to leave by SIGUSR1"
    NODE_LOST = "another node of the same engine has left"


class NodeEnds(Exception):
    """Ends a node. reason: also the number of a signal"""

    def __init__(self, reason: Reason | int) -> None:
        super().__init__(reason)
        self.reason = reason


class EngineNode:
    """Engines of a node, registered with the run's router whenever it is up; `close` ends them.

    run_dir: of the run, which may not have started yet
    machine: this machine, with no rank of the trainer on it
    received: signals received so far
    say: shows a line to the user
    record: registered with the router
    """

    def __init__(
        self,
        cfg: RLConfig,
        run_dir: Path,
        home: Home,
        machine: Machine,
        received: Sequence[int],
        say: Callable[[str], None],
    ) -> None:
        self._cfg, self._run_dir, self._home, self._machine = cfg, run_dir, home, machine
        self._received, self._say, self._file = received, say, router_file(run_dir)
        self._access = Access(engines_key(run_dir), ours=True)
        self._listed: list[NodeRecord] = []  # of healthy nodes
        self._has_run, self._run_seen = False, time.monotonic()
        self._warned: float | None = None
        self._is_closed = False
        self._former: str | None = None  # where the nodes of an engine over several have met the last time
        self._begin()

    def _begin(self) -> None:
        """Resets this node to one without engines."""
        where = f"node {self._home.node} ({socket.gethostname()})"
        self.agent = Agent(self._home, where, (), self._access.api_key or "")
        self.record = NodeRecord(self.agent.offered, served(self._cfg))
        self._others: list[OtherNode] = []  # with which it has an engine: the first one, or all others of the first

    def serve(self) -> Reason | int:
        """Serves until the node is no longer needed; returns the reason, or the number of a signal. Restarts its
        engines when another node of the same engine has left.

        Raises EngineStartError if an engine does not start, or has ended while there was no run to start it again.
        """
        while True:
            try:
                self._start()
                while True:
                    self._look()
            except NodeEnds as end:
                if end.reason != Reason.NODE_LOST:
                    return end.reason
            self._say(f"{Reason.NODE_LOST}: its nodes start it anew when they are together again")
            self._former = self.record.rendezvous
            self._end()
            self._begin()

    def close(self) -> None:
        """Removes the node from the router's list, then ends the engines. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._end()

    def _end(self) -> None:
        if self._has_run:
            self.agent.leave()
            with contextlib.suppress(RolloutError, OSError), contextlib.closing(RouterClient(self._file)) as router:
                if (mine := self._mine(router.nodes())) is not None:
                    router.remove(mine)
            time.sleep(LEAVING_S)
        self.agent.close()
        for node in self._others:
            node.close()

    def _start(self) -> None:
        """Starts the engines, and returns when all of them answer."""
        cfg, model, size = self._cfg, self._cfg.model, self._cfg.placement.nodes_per_engine
        part = self._meet(size) if size > 1 else None
        settings = (started_with(cfg), model.path, model.dtype, self._run_dir / "logs", cfg.run.seed)
        own = start_servers(*settings, self._machine, self._home, self._access, part)
        is_first = part is not None and part.number == 0
        self.agent.add(
            joined([*own, *(one for node in self._others for one in node.engines)], size) if is_first else own
        )
        self.record = replace(self.record, engines=self.agent.offered)
        while not self._is_ready():
            self._look()
        self.record = replace(self.record, state="ready")
        engines = self.record.engines
        self._say(f"ready: {', '.join(engines.names)} at {', '.join(engines.urls)}")

    def _meet(self, size: int) -> Part:
        """Waits for the other nodes of an engine over several nodes. The first node chooses the rendezvous address and
        controls all parts; the others start their parts first."""
        home = self._home
        number = home.node % size
        first, rendezvous = home.node - number, None if number else f"{home.host}:{free_port(home.host)}"
        wanted = [first] if number else range(first + 1, first + size)
        self.record = replace(self.record, rendezvous=rendezvous)
        self._say(f"waiting for {', '.join(f'node {node}' for node in wanted)}, with which it has an engine")

        def is_there(other: NodeRecord) -> bool:
            if rendezvous is not None:
                return other.rendezvous == rendezvous and other.engines.urls != ()
            return other.rendezvous not in (None, self._former)

        others: dict[int, NodeRecord] = {}
        while len(others) < len(wanted):
            self._look()
            others = {one.engines.node: one for one in self._listed if one.engines.node in wanted and is_there(one)}
        silence_s = self._cfg.placement.silence_s
        self._others = [OtherNode(others[node].engines, self._access, silence_s=silence_s) for node in wanted]
        meeting = rendezvous or others[first].rendezvous or ""
        self.record = replace(self.record, rendezvous=meeting)
        return Part(size, number, meeting)

    def _is_ready(self) -> bool:
        try:
            return self.agent.is_ready(self._cfg.rollout.startup_timeout_s)
        except RolloutError:  # another node does not answer: `_look` finds out whether it has left
            return False
        except EngineStartError:
            self._check_others()
            raise

    def _look(self) -> None:
        """Checks the run, the engine's other nodes and received signals once. Raises NodeEnds."""
        time.sleep(LOOK_S)
        placement, now = self._cfg.placement, time.monotonic()
        self._register()
        for number in self._received:
            if number != WARNING:
                raise NodeEnds(number)
        if self.agent.run_is_over:
            raise NodeEnds(Reason.RUN_IS_OVER)
        self._check_others()
        if self._received:
            self._warned = self._warned or now
            stays = now - self._warned <= self._cfg.resilience.save_deadline_s + STAY_S
            if not (self._has_run and self.record.state == "ready" and stays):
                raise NodeEnds(Reason.PREEMPTED)
        away_s = now - self._run_seen
        if away_s > placement.silence_s and (report := self.agent.exit_report()) is not None:
            raise EngineStartError(f"an engine has ended, and there is no run: {report}")
        if away_s > placement.away_s:
            raise NodeEnds(Reason.NO_RUN)

    def _register(self) -> None:
        """Updates this node's record at the router, and reads those of the others."""
        if self._is_closed:
            raise NodeEnds(Reason.PREEMPTED)
        self._listed, now = [], time.monotonic()
        try:
            with contextlib.closing(RouterClient(self._file)) as router:
                listed = router.nodes()
                if (mine := self._mine(listed)) is None or mine.record != self.record:
                    router.register(self.record, mine)
            self._listed, self._run_seen = [node.record for node in listed if node.healthy], now
            has_run = True
        except FileNotFoundError:  # removed by a run that has ended
            has_run = False
        except (RolloutError, OSError):  # a file server may fail once, and a network
            has_run = self._has_run and now - self._run_seen < self._cfg.placement.silence_s
        if has_run != self._has_run:
            self._say("a run has come" if has_run else "the run has gone: waiting for it")
        self._has_run = has_run

    def _mine(self, listed: list[ListedNode]) -> ListedNode | None:
        agent = self.record.engines.agent
        return next((node for node in listed if node.record.engines.agent == agent), None)

    def _check_others(self) -> None:
        if any(node.is_gone for node in self._others):
            raise NodeEnds(Reason.NODE_LOST)
