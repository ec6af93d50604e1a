"""A node that has engines and nothing else: what `mrl serve` does between its start and its end."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mrl.config.derived import Machine
from mrl.config.schema import RLConfig
from mrl.ports import free_port
from mrl.rollout.adapters import started_with
from mrl.rollout.agent import Agent, Home
from mrl.rollout.errors import EngineStartError
from mrl.rollout.launch import Part
from mrl.rollout.members import served
from mrl.rollout.registry import BEAT_S, Beat, Registry, Sign, Watched
from mrl.rollout.start import start_agent

POLL_S = 0.25
LEAVING_S = 2 * BEAT_S  # a run looks as often
STAY_S = 30.0  # beyond the run's own limit for saving
WARNING = signal.SIGUSR1
OVER, WARNED, AWAY, BROKEN = "over", "warned", "away", "broken"

Why = str | int


@dataclass(frozen=True)
class Duty:
    """What a node is to serve.

    run_dir: of the run that lives there, or will
    machine: this one, with no rank of the trainer on it
    received: numbers of signals, as they come
    say: takes one line for the user
    """

    cfg: RLConfig
    run_dir: Path
    home: Home
    machine: Machine
    received: Sequence[int]
    say: Callable[[str], None]

    @property
    def size(self) -> int:
        """Nodes that have an engine together."""
        return self.cfg.placement.nodes_per_engine

    @property
    def told(self) -> Why:
        """Why it ends, once it has received a signal and there is no run to wait for."""
        return WARNED if self.received[0] == WARNING else self.received[0]

    def others(self) -> list[int]:
        """Their numbers, without this one's; the first of all answers requests."""
        first = self.home.node - self.home.node % self.size
        return [number for number in range(first, first + self.size) if number != self.home.node]


def serve(duty: Duty) -> Why:
    """Until there is nobody to serve any more. OVER: the run has made its last step; AWAY: there has been no run for
    placement.away_s; WARNED: told to leave by SIGUSR1, and the run has left; or the number of another signal.

    Raises EngineStartError if an engine does not start, or has ended while there was no run to start it again.
    """
    meeting: Part | None = None
    for _ in range(1 + duty.cfg.rollout.max_restarts):
        found = meet(duty, meeting)
        if isinstance(found, (str, int)):
            return found
        meeting = found
        with contextlib.closing(EngineNode(duty, meeting)) as node:
            why = node.serve()
        if why != BROKEN:
            return why
        duty.say("the engine has lost one of its parts: all nodes that have some start it again")
    raise EngineStartError(f"rollout.max_restarts = {duty.cfg.rollout.max_restarts} restarts are used up")


def meet(duty: Duty, former: Part | None) -> Part | None | Why:
    """This node's part of an engine over several, as the first of them says, after it has started anew since the
    `former`; None where an engine has one node. AWAY or a signal's number if the first one does not come."""
    if duty.size == 1:
        return None
    number = duty.home.node % duty.size
    if number == 0:
        return Part(duty.size, 0, f"{duty.home.host}:{free_port(duty.home.host)}")
    first, end = duty.others()[0], time.monotonic() + duty.cfg.placement.away_s
    watched = Watched(Registry(duty.run_dir).node(first), duty.cfg.placement.silence_s)
    duty.say(f"waiting for node {first}, with which it has an engine")
    while True:
        sign = watched.look()
        if sign is not None and sign.meeting is not None and (former is None or sign.meeting != former.meeting):
            return Part(duty.size, number, sign.meeting)
        if duty.received:
            return duty.told
        if time.monotonic() > end:
            return AWAY
        time.sleep(POLL_S)


@dataclass
class Companions:
    """The other nodes of an engine, by number: their files, and the lives of those that have met this one."""

    watched: dict[int, Watched]
    meeting: str | None
    met: dict[int, str] = field(default_factory=dict)

    def look(self) -> bool:
        """Whether all are there. A node that was, and is not any more, is looked for in vain: `is_broken`."""
        for number, watched in self.watched.items():
            sign = watched.look()
            is_here = sign is not None and sign.meeting == self.meeting
            if is_here and sign is not None and number not in self.met:
                self.met[number] = sign.life
            if number in self.met and (sign is None or not is_here or sign.life != self.met[number]):
                self.met[number] = ""
        return len(self.met) == len(self.watched) and not self.is_broken

    @property
    def is_broken(self) -> bool:
        return "" in self.met.values()


class EngineNode:
    """The engines of a node, registered at construction; `close` ends them.

    part: this node's, of an engine over several; None: they are whole
    """

    def __init__(self, duty: Duty, part: Part | None = None) -> None:
        self._duty, self._part, cfg = duty, part, duty.cfg
        self._registry = registry = Registry(duty.run_dir)
        self._key = registry.key()
        silence_s, meeting = cfg.placement.silence_s, part.meeting if part is not None else None
        self._run = Watched(registry.run, silence_s)
        self._others = Companions({n: Watched(registry.node(n), silence_s) for n in duty.others()}, meeting)
        self._agent: Agent | None = None
        self._beat = Beat(registry.node(duty.home.node), "starting", served(cfg), meeting=meeting)

    def close(self) -> None:
        """The run sees that the node has left, then the engines end."""
        self._beat.close()
        if self._agent is not None:
            if self._run.look() is not None:
                time.sleep(LEAVING_S)
            self._agent.close()

    def serve(self) -> Why:
        """As `serve`, and BROKEN when an engine over several nodes has lost one or its part here."""
        if (why := self._gather()) is not None:
            return why
        duty, model = self._duty, self._duty.cfg.model
        self._agent = agent = start_agent(
            started_with(duty.cfg),
            model.path,
            model.dtype,
            duty.run_dir / "logs",
            duty.cfg.run.seed,
            machine=duty.machine,
            home=duty.home,
            where=f"node {duty.home.node} ({socket.gethostname()})",
            key=self._key,
            part=self._part,
        )
        self._beat.say("starting", agent.offered)
        why = self._start(agent)
        return why if why is not None else self._stay(agent)

    def _gather(self) -> Why | None:
        """Until the other nodes of the engine are there."""
        end = time.monotonic() + self._duty.cfg.placement.away_s
        while not self._others.look():
            if self._duty.received:
                return self._duty.told
            if self._others.is_broken:
                return BROKEN
            if time.monotonic() > end:
                return AWAY
            time.sleep(POLL_S)
        return None

    def _start(self, agent: Agent) -> Why | None:
        """Until all engines answer."""
        while not self._is_ready(agent):
            if self._duty.received:
                return self._duty.told
            if self._is_broken(agent):
                return BROKEN
            time.sleep(POLL_S)
        self._beat.say("ready")
        self._duty.say(f"ready: {', '.join(agent.offered.names)} at {', '.join(agent.offered.urls)}")
        return None

    def _is_ready(self, agent: Agent) -> bool:
        try:
            return agent.is_ready(self._duty.cfg.rollout.startup_timeout_s)
        except EngineStartError:
            if self._part is None or not self._is_broken(agent):
                raise
            return False

    def _is_broken(self, agent: Agent) -> bool:
        """Nobody but its nodes can start an engine over several again."""
        self._others.look()
        return self._part is not None and (self._others.is_broken or agent.obituary() is not None)

    def _stay(self, agent: Agent) -> Why:
        cfg, received, last = self._duty.cfg, self._duty.received, time.monotonic()
        warned: float | None = None
        seen: Sign | None = None
        while True:
            time.sleep(POLL_S)
            run, now = self._run.look(), time.monotonic()
            if at_once := [number for number in received if number != WARNING]:
                return at_once[0]
            if run is not None and run.state == "over":
                return OVER
            if self._is_broken(agent):
                return BROKEN
            last = now if run is not None else last
            seen = self._note(seen, run)
            if received:
                warned = warned or now
                if run is None or now - warned > cfg.resilience.save_deadline_s + STAY_S:
                    return WARNED
            if run is None:
                self._check_alone(agent, now - last)
                if now - last > cfg.placement.away_s:
                    return AWAY

    def _note(self, seen: Sign | None, run: Sign | None) -> Sign | None:
        """Tells when a run comes and goes; the one that is there."""
        if (seen.life if seen else None) != (run.life if run else None):
            self._duty.say("a run has come" if run is not None else "the run has gone: waiting for it")
        return run

    def _check_alone(self, agent: Agent, seconds: float) -> None:
        """An engine that ends is the run's to start again, if there is one."""
        if seconds > self._duty.cfg.placement.silence_s and (obituary := agent.obituary()) is not None:
            raise EngineStartError(f"an engine has ended, and there is no run: {obituary}")
