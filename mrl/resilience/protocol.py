"""What ranks and their launcher tell each other: exit codes, where a rank is, that it left in good order.

Standard library only: the launcher reads it before torch is there.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mrl.files import write_atomically

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: saved and left after a signal; the same command goes on
LOG_DIR_VARIABLE = "MRL_LOG_DIR"  # set by the launcher for ranks that torchrun or ft_launcher starts for it
FOLDER_VARIABLE = "MRL_LAUNCHER_FOLDER"  # of one node's launcher: where its ranks write down their process ids
MARKER = "preempted"  # in the run directory; gone again when the run goes on

SECTIONS = ("setup", "rollout", "reward", "update", "sync", "checkpoint")


@dataclass(frozen=True)
class Place:
    """Where a rank is. attempt: one more with each restart. section: the innermost open one. since: Unix time."""

    rank: int
    pid: int
    attempt: int
    section: str | None
    since: float
    ended: bool = False

    @classmethod
    def mine(cls, section: str | None, ended: bool = False) -> Place:
        return cls(int(os.environ["RANK"]), os.getpid(), attempt(), section, time.time(), ended)

    def write(self, log_dir: Path) -> None:
        write_atomically(place_file(log_dir, self.rank), json.dumps(asdict(self)))


def place_file(log_dir: Path, rank: int) -> Path:
    return log_dir / f"rank_{rank}.place"


def read_places(log_dir: Path, ranks: int) -> list[Place]:
    """Of the ranks that have written one."""
    files = [place_file(log_dir, rank) for rank in range(ranks)]
    return [Place(**json.loads(file.read_text())) for file in files if file.exists()]


def note_leaving(run_dir: Path, step: int | None) -> None:
    """The run in that directory, which is there, is to be continued. step: the last that is saved; None: not known, or
    there is none"""
    content = json.dumps({"step": step, "unix_time": round(time.time(), 3)}) + "\n"
    write_atomically(run_dir / MARKER, content)


def attempt() -> int:
    """How often torchrun or ft_launcher has started this launch's ranks anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def started_by_torchelastic() -> bool:
    """Under torchrun or ft_launcher: they answer every exit code but 0 with a restart, or with their own code 1."""
    return "TORCHELASTIC_RUN_ID" in os.environ
