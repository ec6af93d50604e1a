"""Logs of the ranks, and the failure files that ranks leave beside them."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl import failure
from mrl.failure import Failure
from mrl.files import lock, make_private
from mrl.redaction import redact
from mrl.resilience.protocol import EXIT_PREEMPTED
from mrl.terminal import Terminal

TAIL_LINES = 30
RESERVED_BYTES = 1 << 16  # bytes reserved for a rank's error and traceback
PREEMPTED_TEXT = (
    f"stopped before its end (exit code {EXIT_PREEMPTED}): run the same command to resume from the last checkpoint, if "
    "there is one"
)


class LaunchError(RuntimeError):
    """The world could not be started."""


@dataclass(frozen=True)
class RankLog:
    """Log of a rank; this launch's part begins at byte `start`."""

    path: Path
    start: int

    def tail(self) -> str:
        """Returns the last lines of this attempt; empty if there are none."""
        with contextlib.suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(max(self.start, self.path.stat().st_size - 200 * TAIL_LINES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
        return ""

    def last_written(self) -> float:
        """Returns the Unix time of the last write; 0 if the log is gone."""
        with contextlib.suppress(FileNotFoundError):
            return self.path.stat().st_mtime
        return 0.0

    @property
    def failure_file(self) -> Path:
        """File in which the rank reports its error to the launcher."""
        return self.path.with_suffix(".failure")


def open_logs(log_dir: Path, nproc: int, command: Sequence[str]) -> list[RankLog]:
    logs = []
    for number in range(nproc):
        path = log_dir / f"rank_{number}.log"
        failure_file = path.with_suffix(".failure")
        failure_file.unlink(missing_ok=True)
        failure.reserve(failure_file).write_bytes(bytes(RESERVED_BYTES))
        with path.open("ab") as file:
            said = f"--- {time.strftime('%F %T')} rank {number} of {nproc}: {redact(shlex.join(command))}\n"
            file.write(said.encode())
            logs.append(RankLog(path, file.tell()))
    return logs


def collect_failures(logs: Sequence[RankLog], terminal: Terminal) -> dict[int, Failure]:
    """Returns the error of each failed rank. Moves tracebacks to the ranks' logs and removes the failure files."""
    found = {}
    for number, log in enumerate(logs):
        error = failure.read(log.failure_file)
        if error is None:
            continue
        found[number] = error
        if number == 0:
            terminal.log(error.traceback)
        else:
            with contextlib.suppress(OSError), log.path.open("a") as file:  # a full disk
                file.write(error.traceback)
        log.failure_file.unlink()
    return found


def root_cause(failures: Mapping[int, Failure], killed: bool) -> tuple[int, Failure] | None:
    """Returns the first rank whose failure explains the others, with that failure.

    Returns None if a rank was killed and the others only lost contact with it.
    """
    own = [found for found in failures.values() if not found.lost_contact]
    rest = [] if killed else list(failures.values())
    first = min(own or rest, key=lambda found: found.unix_time, default=None)
    if first is None:
        return None
    return min(number for number, found in failures.items() if found.message == first.message), first


@contextlib.contextmanager
def lock_log_dir(log_dir: Path) -> Iterator[None]:
    """Holds the directory for this launcher alone. Raises LaunchError if another launcher writes there."""
    make_private(log_dir.parent)
    log_dir.mkdir(exist_ok=True)
    with (log_dir / ".launcher.lock").open("a+b") as marker:
        if not lock(marker):
            marker.seek(0)
            owner = marker.read().decode() or "a process that has just started"
            raise LaunchError(f"{log_dir} is in use by another run ({owner}): stop it, or choose another run.name")
        marker.truncate(0)
        marker.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        marker.flush()
        try:
            yield
        finally:
            for unused in log_dir.glob("*.reserve"):
                unused.unlink(missing_ok=True)
