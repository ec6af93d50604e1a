"""First actions of a rank.

A rank that torchrun or ft_launcher starts for `mrl train` behaves as under mrl's own launcher: it has a log and a
failure file, and ends with its parent.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mrl import failure
from mrl.forks import die_with_parent
from mrl.resilience.protocol import FOLDER_VARIABLE, LOG_DIR_VARIABLE, RankStatus, started_by_torchelastic


def log_dir() -> Path | None:
    """Returns the folder of the ranks' logs; None unless `mrl train` started this world through another launcher."""
    name = os.environ.get(LOG_DIR_VARIABLE)
    return Path(name) if name else None


def process_name(rank: int) -> str:
    """Process name of a rank, up to 15 characters."""
    return f"mrl rank {rank}"


def set_up_process() -> None:
    """Sets the process name that `top` shows. Rank 0's errors join its output, which the launcher shows; other ranks
    write to rank_N.log."""
    rank = int(os.environ["RANK"])
    with contextlib.suppress(OSError):  # no Linux
        Path("/proc/self/comm").write_text(process_name(rank))
    if started_by_torchelastic():
        die_with_parent()
    if folder := os.environ.get(FOLDER_VARIABLE):
        RankStatus.of_this_rank("setup").write(Path(folder))
    directory = log_dir()
    if directory is None:
        return
    if rank == 0:
        os.dup2(1, 2)
    else:
        with (directory / f"rank_{rank}.log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    failure_file = directory / f"rank_{rank}.failure"
    failure_file.unlink(missing_ok=True)
    os.environ[failure.FILE_VARIABLE] = str(failure_file)
    RankStatus.of_this_rank("setup").write(directory)
