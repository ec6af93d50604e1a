"""The engine nodes of a run with none of its own: which are there, as rank 0 sees them. See `mrl.rollout.registry`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.config.schema import PlacementConfig, RLConfig
from mrl.rollout.access import Access
from mrl.rollout.errors import EngineStartError
from mrl.rollout.group import Group
from mrl.rollout.registry import BEAT_S, LEAVE_S, Beat, Registry, Sign, Watched


def served(cfg: RLConfig) -> dict[str, Any]:
    """What trainer and `mrl serve` must be told alike, by key."""
    rollout, placement = cfg.rollout, cfg.placement
    return {
        "rollout.engine": rollout.engine,
        "rollout.servers": rollout.servers,
        "rollout.tensor": rollout.tensor,
        "rollout.deterministic": rollout.deterministic,
        "placement.nodes_per_engine": placement.nodes_per_engine,
        "model.dtype": cfg.model.dtype,
        "actor.routing_replay": cfg.actor.routing_replay,
    }


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """In words; empty where there are none."""
    wrong = [key for key, value in ours.items() if theirs.get(key) != value]
    return ", ".join(f"{key} is {theirs.get(key)}, the run has {ours[key]}" for key in wrong)


class Members:
    """Looks after the nodes in a thread, and gives a sign of the run's life, until `close`."""

    def __init__(self, run_dir: Path, placement: PlacementConfig, what: Mapping[str, Any], access: Access) -> None:
        self._registry, self._placement, self._what, self._access = Registry(run_dir), placement, what, access
        self._watched: dict[int, Watched] = {}
        self._signs: dict[int, Sign] = {}  # of those that live
        self._taken: list[Group] = []
        self._refused: dict[str, str] = {}  # why, by life
        self._closed, self._looking = threading.Event(), threading.Lock()
        self._beat = Beat(self._registry.run, "running", what)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="engine nodes")
        self._thread.start()

    @property
    def wait_s(self) -> float:
        """How long a run waits for nodes."""
        return self._placement.wait_s

    @property
    def silence_s(self) -> float:
        """After this long without a sign a node is gone."""
        return self._placement.silence_s

    def wait(self) -> None:
        """Until as many nodes are ready as the run was promised. Raises EngineStartError after `wait_s`, with which
        are, and what is known of the others."""
        end = time.monotonic() + self.wait_s
        while self.lacking:
            if time.monotonic() > end:
                raise EngineStartError(self._absent())
            time.sleep(BEAT_S / 4)

    @property
    def lacking(self) -> bool:
        """Whether fewer are ready than were promised."""
        return len(self._ready()) < self._placement.groups

    def arrivals(self) -> Iterator[Group]:
        """Nodes that are ready and that the caller has not had yet."""
        for signs in self._ready():
            if not any(signs[0].life in group.lives for group in self._taken):
                group = Group(signs, self._access)
                with self._looking:
                    self._taken.append(group)
                yield group

    def drop(self, group: Group, refused: str | None = None) -> None:
        """The run goes on without it; refused: for good, as it is now, and why."""
        group.close()
        with self._looking:
            self._taken = [one for one in self._taken if one is not group]
            if refused is not None:
                self._refused |= dict.fromkeys(group.lives, refused)

    def over(self) -> None:
        """The run has made its last step: nobody need wait for it any more."""
        self._beat.say("over")
        self._beat.close(leave=True)

    def close(self) -> None:
        """No sign from now on: the run has ended, or will be started again."""
        self._closed.set()
        self._thread.join(LEAVE_S)
        sign = Sign.read(self._registry.run)
        self._beat.close(leave=sign is not None and sign.state == "over")
        for group in self._taken:
            group.close()

    # ---- looking

    def _watch(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                self._look()
            self._closed.wait(BEAT_S / 2)

    def _look(self) -> None:
        for number, file in self._registry.nodes().items():
            self._watched.setdefault(number, Watched(file, self.silence_s))
        found = {number: sign for number, watched in self._watched.items() if (sign := watched.look()) is not None}
        with self._looking:
            self._signs = found
            lives = {sign.life for sign in found.values()}
            for group in self._taken:
                group.look(lives)

    def _good(self) -> dict[int, Sign]:
        """Of those that live, by number, who serve what this run wants."""
        with self._looking:
            signs = dict(self._signs)
        return {
            number: sign
            for number, sign in signs.items()
            if sign.life not in self._refused and not differences(sign.what, self._what)
        }

    def _ready(self) -> list[list[Sign]]:
        """Of each engine's nodes, or of each node with its engines, where all are ready and have met each other."""
        good, size = self._good(), self._placement.nodes_per_engine
        found = []
        for first in sorted(good):
            signs = [good[number] for number in range(first, first + size) if number in good]
            whole = len(signs) == size and len({sign.meeting for sign in signs}) == 1
            if first % size == 0 and whole and all(sign.state == "ready" for sign in signs):
                found.append(signs)
        return found

    def _absent(self) -> str:
        wanted, ready = self._placement.nodes, len(self._ready()) * self._placement.nodes_per_engine
        lines = [
            f"{ready} of {wanted} engine nodes (placement.nodes) are ready after placement.wait_s = {self.wait_s:g} s. "
            "Each is a `mrl serve` of this configuration, with a --node of its own, that sees this run's directory"
        ]
        return "\n".join([*lines, self.known])

    @property
    def known(self) -> str:
        """Of every node that has ever been there, a line."""
        lines = [f"  node {number}: {self._state(number)}" for number in sorted(self._registry.nodes())]
        return "\n".join(lines) or "no node has ever been there"

    def _state(self, number: int) -> str:
        sign = self._signs.get(number)
        if sign is None:
            return f"no sign of life; what lies in {self._registry.node(number)} is not believed"
        where = sign.offered.where if sign.offered is not None else "somewhere"
        if wrong := differences(sign.what, self._what):
            return f"{where}: of another configuration: {wrong}"
        return f"{where}: {self._refused.get(sign.life) or sign.state}"
