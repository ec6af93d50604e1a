"""A node that has engines and nothing else: what `mrl serve` does between its start and its end."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mrl.config.derived import Machine
from mrl.config.schema import RLConfig
from mrl.rollout.agent import Agent, Home
from mrl.rollout.errors import EngineStartError
from mrl.rollout.members import served
from mrl.rollout.registry import BEAT_S, Beat, Registry, Sign, Watched
from mrl.rollout.start import start_agent

POLL_S = 0.25
LEAVING_S = 2 * BEAT_S  # a run looks as often
STAY_S = 30.0  # beyond the run's own limit for saving
WARNING = signal.SIGUSR1
OVER, WARNED, AWAY = "over", "warned", "away"


class EngineNode:
    """The engines of node `home`, started and registered at construction, for the run that lives or will live in
    `run_dir`. `close` ends them.

    machine: this one, with no rank of the trainer on it
    received: numbers of signals, as they come
    say: takes one line for the user
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
        registry, model = Registry(run_dir), cfg.model
        self._cfg, self._received, self._say = cfg, received, say
        self._run = Watched(registry.run, cfg.placement.silence_s)
        where = f"node {home.node} ({socket.gethostname()})"
        with contextlib.ExitStack() as stack:
            agent = start_agent(
                cfg.rollout,
                model.path,
                model.dtype,
                run_dir / "logs",
                cfg.run.seed,
                machine=machine,
                home=home,
                where=where,
                key=registry.key(),
            )
            self._agent: Agent = stack.enter_context(contextlib.closing(agent))
            file = registry.node(home.node)
            self._beat = stack.enter_context(contextlib.closing(Beat(file, "starting", served(cfg), agent.offered)))
            self._stack = stack.pop_all()

    def close(self) -> None:
        """The run sees that the node has left, then the engines end."""
        self._beat.close()
        if self._run.look() is not None:
            time.sleep(LEAVING_S)
        self._stack.close()

    def serve(self) -> str | int:
        """Until there is nobody to serve any more. OVER: the run has made its last step; AWAY: there has been no run
        for placement.away_s; WARNED: told to leave by SIGUSR1, and the run has left; or the number of another signal.

        Raises EngineStartError if an engine does not start, or has ended while there was no run to start it again.
        """
        return self._start() or self._stay()

    def _start(self) -> int | None:
        """Until all engines answer; the number of the signal that came before."""
        while not self._agent.is_ready(self._cfg.rollout.startup_timeout_s):
            if self._received:
                return self._received[0]
            time.sleep(POLL_S)
        self._beat.say("ready")
        self._say(f"ready: {', '.join(self._agent.offered.names)} at {', '.join(self._agent.offered.urls)}")
        return None

    def _stay(self) -> str | int:
        seen = warned = None
        last = time.monotonic()
        while True:
            time.sleep(POLL_S)
            run, now = self._run.look(), time.monotonic()
            if at_once := [number for number in self._received if number != WARNING]:
                return at_once[0]
            if run is not None and run.state == "over":
                return OVER
            last = now if run is not None else last
            seen = self._note(seen, run)
            if self._received:
                warned = warned or now
                if run is None or now - warned > self._cfg.resilience.save_deadline_s + STAY_S:
                    return WARNED
            if run is None:
                self._check_alone(now - last)
                if now - last > self._cfg.placement.away_s:
                    return AWAY

    def _note(self, seen: Sign | None, run: Sign | None) -> Sign | None:
        """Tells when a run comes and goes; the one that is there."""
        if (seen.life if seen else None) != (run.life if run else None):
            self._say("a run has come" if run is not None else "the run has gone: waiting for it")
        return run

    def _check_alone(self, seconds: float) -> None:
        """An engine that ends is the run's to start again, if there is one."""
        if seconds > self._cfg.placement.silence_s and (obituary := self._agent.obituary()) is not None:
            raise EngineStartError(f"an engine has ended, and there is no run: {obituary}")
