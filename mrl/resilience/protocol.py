"""Protocol between ranks and launcher: exit codes, a rank's section, orderly exit.

Standard library only, since the launcher uses it before torch is imported.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mrl.files import write_atomically

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: saved and left after a signal; the same command resumes
LOG_DIR_VARIABLE = "MRL_LOG_DIR"  # set by the launcher for ranks that torchrun or ft_launcher starts for it
FOLDER_VARIABLE = "MRL_LAUNCHER_FOLDER"  # folder of a node's launcher, where its ranks write their process ids
MARKER = "preempted"  # in the run directory; removed when the run resumes

SECTIONS = ("setup", "rollout", "reward", "update", "sync", "checkpoint")


@dataclass(frozen=True)
class RankStatus:
    """Current section of a rank."""

    rank: int
    pid: int
    attempt: int  # incremented by each restart
    section: str | None  # the innermost open one
    since: float  # Unix time
    ended: bool = False

    @classmethod
    def of_this_rank(cls, section: str | None, ended: bool = False) -> RankStatus:
        return cls(int(os.environ["RANK"]), os.getpid(), attempt(), section, time.time(), ended)

    def write(self, log_dir: Path) -> None:
        write_atomically(log_dir / f"rank_{self.rank}.place", json.dumps(asdict(self)))


def read_statuses(log_dir: Path) -> list[RankStatus]:
    """Returns the statuses of the ranks of the newest attempt that have written one, in the order of the ranks."""
    found = [RankStatus(**json.loads(file.read_text())) for file in log_dir.glob("rank_*.place")]
    newest = max((status.attempt for status in found), default=0)
    return sorted((status for status in found if status.attempt == newest), key=lambda status: status.rank)


def remove_statuses(log_dir: Path) -> None:
    for file in log_dir.glob("rank_*.place"):
        file.unlink()


def mark_preempted(run_dir: Path, step: int | None) -> None:
    """Marks the run of an existing directory as one to resume. step: last saved; None: unknown or none"""
    content = json.dumps({"step": step, "unix_time": round(time.time(), 3)}) + "\n"
    write_atomically(run_dir / MARKER, content)


def attempt() -> int:
    """Returns how often torchrun or ft_launcher has restarted the ranks of this launch."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def started_by_torchelastic() -> bool:
    """True under torchrun or ft_launcher, which answer a nonzero exit code with a restart, or with their own code 1."""
    return "TORCHELASTIC_RUN_ID" in os.environ
