"""How a run and its engine nodes find each other: files in RUN_DIR/engines, each readable by its owner alone.

    key          opens all engines of the run: drawn by whoever comes first, kept for as long as the directory
    run.json     the trainer's sign of life
    node_K.json  that of the `mrl serve` that is node K, with its engines' addresses

A sign is written anew every few seconds, and believed only while somebody who looks sees it move: what a dead process
has left lies still. Clocks of different machines are never compared. The path has to mean the same on all nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mrl.config.secret_file import read_secret
from mrl.files import make_private, write_privately
from mrl.rollout.agent import Offered

FOLDER = "engines"
BEAT_S = 1.0
LEAVE_S = 10.0  # that an end waits for a thread which is held up by the file server
State = Literal["starting", "ready", "running", "over"]


@dataclass(frozen=True)
class Sign:
    """What a process says of itself.

    life: drawn at its start: a process that takes its place is another one
    beats: counts the times that it was written
    what: with what it serves, for others to compare
    offered: a node's engines
    meeting: where the nodes of an engine over several have met; None: each node has its own
    """

    life: str
    beats: int
    state: State
    what: Mapping[str, Any]
    offered: Offered | None = None
    meeting: str | None = None

    def write(self, file: Path) -> None:
        write_privately(file, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, file: Path) -> Sign | None:
        """None where there is none, or one that cannot be read."""
        try:
            found = json.loads(file.read_text())
            offered = found.pop("offered")
            if offered is not None:
                lists = {name: tuple(offered[name]) for name in ("names", "urls", "logs")}
                offered = Offered(**{**offered, **lists})
            return cls(**found, offered=offered)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


class Registry:
    """The folder. Making one makes it, with the run directory, if need be."""

    def __init__(self, run_dir: Path) -> None:
        make_private(run_dir)
        self.folder = run_dir / FOLDER
        make_private(self.folder)
        self.run = self.folder / "run.json"

    def node(self, number: int) -> Path:
        return self.folder / f"node_{number}.json"

    def nodes(self) -> dict[int, Path]:
        """By number, those whose files are there."""
        files = {file.stem.removeprefix("node_"): file for file in self.folder.glob("node_*.json")}
        return {int(number): file for number, file in files.items() if number.isdecimal()}

    def key(self) -> str:
        """Raises ValueError for a file that others can read."""
        file = self.folder / "key"
        if not file.exists():
            mine = self.folder / f".key.{secrets.token_hex(8)}"
            write_privately(mine, secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(mine, file)  # whole, and for one of several alone
            mine.unlink()
        return read_secret(str(file))


class Beat:
    """Writes a sign in a thread until `close`, which removes it, or leaves it as it is."""

    def __init__(
        self,
        file: Path,
        state: State,
        what: Mapping[str, Any],
        offered: Offered | None = None,
        meeting: str | None = None,
    ) -> None:
        self._file, self._closed, self._writing = file, threading.Event(), threading.Lock()
        self._sign = Sign(secrets.token_hex(8), 0, state, what, offered, meeting)
        self._write()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"sign {file.name}")
        self._thread.start()

    @property
    def life(self) -> str:
        return self._sign.life

    def say(self, state: State, offered: Offered | None = None) -> None:
        """At once, and from now on; offered: None: what was offered before."""
        with self._writing:
            new = {"state": state, "offered": offered or self._sign.offered}
            self._sign = Sign(**{**vars(self._sign), **new})
        self._write()

    def close(self, *, leave: bool = False) -> None:
        """Safe to call twice."""
        self._closed.set()
        self._thread.join(LEAVE_S)
        if not leave and (left := Sign.read(self._file)) is not None and left.life == self.life:
            self._file.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a full disk, a server that is away: who looks sees no sign
                self._write()

    def _write(self) -> None:
        with self._writing:
            self._sign = Sign(**{**vars(self._sign), "beats": self._sign.beats + 1})
            self._sign.write(self._file)


class Watched:
    """A file that somebody else's sign is in. `look` often: it believes what it has seen move."""

    def __init__(self, file: Path, silence_s: float) -> None:
        self._file, self._silence_s = file, silence_s
        self._last = Sign.read(file)
        self._moved: float | None = None  # when; None: never

    def look(self) -> Sign | None:
        """The sign as it is now; None where it is not there, or lies still."""
        found, now = Sign.read(self._file), time.monotonic()
        if found is None and self._file.exists():  # not readable for a moment
            found = self._last
        if found is None:
            self._last = self._moved = None
            return None
        if self._last is None or (found.life, found.beats) != (self._last.life, self._last.beats):
            self._moved = now if self._last is not None else None
        self._last = found
        return found if self._moved is not None and now - self._moved < self._silence_s else None
