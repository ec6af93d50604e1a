"""Starts the ranks of one machine and lets none of them outlive the others, or this process.

Every rank leads its own process group, and the kernel kills it when the launcher dies (Linux). Rank 0's output goes to
the terminal, as it comes, and to its log; the others write to theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import math
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mrl import failure
from mrl.failure import Failure
from mrl.terminal import Terminal

TAIL_LINES = 30
_POLL_S = 0.05
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PORTS = range(20000, 32000)  # below the range from which outgoing connections are numbered


class LaunchError(RuntimeError):
    """The world could not be started."""


@dataclass(frozen=True)
class Log:
    """A rank's log; this launch's part of it begins at byte `start`."""

    path: Path
    start: int

    def tail(self) -> str:
        with self.path.open("rb") as file:
            file.seek(max(self.start, self.path.stat().st_size - 200 * TAIL_LINES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-TAIL_LINES:])

    @property
    def failure_file(self) -> Path:
        """Where the rank writes its error down for this process."""
        return self.path.with_suffix(".failure")


@dataclass
class Rank:
    """One process; `code` is its exit code, or minus the signal that killed it."""

    number: int
    process: subprocess.Popen[bytes]
    log: Log
    code: int | None = None

    def poll(self) -> bool:
        """Has it ended? Its children that are still there are then killed before its id can be used again."""
        if self.code is None and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.kill_group()
            self.code = self.process.wait()
        return self.code is not None

    def signal(self, number: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.process.pid, number)

    def failure(self) -> Failure | None:
        return failure.read(self.log.failure_file)

    def kill_group(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def launch(
    command: Sequence[str],
    nproc: int,
    log_dir: Path,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30.0,
    settle_s: float = 5.0,
) -> int:
    """Runs `command` as ranks 0..nproc-1 of one world; returns 0, or the exit code of the first rank that failed.

    After a failure the others get `settle_s` seconds to report the same error and end by themselves, then SIGTERM, then
    after `grace_s` SIGKILL with all their children. SIGINT, SIGTERM and SIGHUP here end the ranks in the same way (a
    second SIGINT at once) and give 128 + the signal's number. Logs: log_dir/rank_N.log, appended to.

    Raises LaunchError if another launcher writes there.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with _owned(log_dir), _signals() as received:
        logs = [_open_log(log_dir, number, nproc, command) for number in range(nproc)]
        with Terminal(logs[0].path) as terminal:
            ranks = _start(command, logs, os.environ if env is None else env, terminal)
            return _World(ranks, grace_s, settle_s, terminal).wait(received)


class _World:
    """The ranks, and the two clocks of their ending: SIGTERM is due at `term_at`, SIGKILL at `kill_at`."""

    def __init__(self, ranks: list[Rank], grace_s: float, settle_s: float, terminal: Terminal) -> None:
        self.ranks, self.grace_s, self.settle_s, self.terminal = ranks, grace_s, settle_s, terminal
        self.failed: Rank | None = None
        self.term_at = self.kill_at = math.inf
        self.ending = False

    def wait(self, received: Sequence[int]) -> int:
        """`received`: the stopping signals so far, filled in from outside."""
        try:
            while self._running():
                self.terminal.pump(_POLL_S)
                self._note_failure()
                self._end_if_due(received)
        finally:
            self.kill()
        self.terminal.drain()
        self._note_failure()
        if received:
            self.terminal.say(f"stopped by {signal.Signals(received[0]).name}; all ranks have ended")
            return 128 + received[0]
        if self.failed is None:
            return 0
        self._report(self.failed)
        return _exit_code(self.failed)

    def _running(self) -> int:
        return sum(not rank.poll() for rank in self.ranks)

    def _note_failure(self) -> None:
        """Of ranks that are found failed together: one that was killed, or the one that stopped writing first."""
        failed = [rank for rank in self.ranks if rank.code]
        if failed and self.failed is None:
            self.failed = min(failed, key=lambda rank: ((rank.code or 0) > 0, rank.log.path.stat().st_mtime_ns))
            self.term_at = time.monotonic() + self.settle_s

    def _end_if_due(self, received: Sequence[int]) -> None:
        now = time.monotonic()
        if not self.ending and (received or now >= self.term_at):
            self.ending, self.kill_at = True, now + self.grace_s
            for rank in self.ranks:
                rank.signal(signal.SIGTERM)
        if now >= self.kill_at or received.count(signal.SIGINT) > 1:
            self.kill()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill_group()

    def _report(self, first: Rank) -> None:
        failures = {rank.number: found for rank in self.ranks if (found := rank.failure())}
        for rank in self.ranks:
            if rank.number in failures:
                self._keep(rank, failures[rank.number])
        cause = _cause(failures, killed=(first.code or 0) < 0)
        if cause is None:
            self._report_silent(first)
            return
        self.terminal.say(f"error: {cause.message}")
        alike = [number for number, found in failures.items() if found.message == cause.message]
        self.terminal.say(f"details: {self.ranks[min(alike)].log.path}")

    def _keep(self, rank: Rank, found: Failure) -> None:
        """Moves the traceback into the rank's log."""
        if rank.number == 0:
            self.terminal.log(found.traceback)
        else:
            with rank.log.path.open("a") as file:
                file.write(found.traceback)
        rank.log.failure_file.unlink()

    def _report_silent(self, first: Rank) -> None:
        """Of ranks that could not or did not write down what happened to them."""
        self.terminal.say(f"error: rank {first.number} failed first ({_how(first)}); its log: {first.log.path}")
        if first.number and first.code != -signal.SIGKILL:
            self.terminal.say(first.log.tail(), prefix="")
        for rank in self.ranks:
            if rank is not first and rank.code:
                self.terminal.say(f"rank {rank.number} ended too ({_how(rank)}); its log: {rank.log.path}")


def _cause(failures: Mapping[int, Failure], killed: bool) -> Failure | None:
    """The failure that explains the others; none if a rank was killed and the others only lost contact with it."""
    own = [found for found in failures.values() if not found.lost_contact]
    rest = [] if killed else list(failures.values())
    return min(own or rest, key=lambda found: found.unix_time, default=None)


def _open_log(log_dir: Path, number: int, nproc: int, command: Sequence[str]) -> Log:
    path = log_dir / f"rank_{number}.log"
    path.with_suffix(".failure").unlink(missing_ok=True)
    with path.open("ab") as file:
        file.write(f"--- {time.strftime('%F %T')} rank {number} of {nproc}: {shlex.join(command)}\n".encode())
        return Log(path, file.tell())


def _start(command: Sequence[str], logs: Sequence[Log], env: Mapping[str, str], terminal: Terminal) -> list[Rank]:
    shared = {
        **{"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **env},
        **{"WORLD_SIZE": str(len(logs)), "LOCAL_WORLD_SIZE": str(len(logs))},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())},
    }
    prepare = _dies_with_this_process()
    ranks: list[Rank] = []
    try:
        for number, log in enumerate(logs):
            with log.path.open("ab") as file:
                process = subprocess.Popen(
                    command,
                    env={
                        **{**shared, "RANK": str(number), "LOCAL_RANK": str(number)},
                        failure.FILE_VARIABLE: str(log.failure_file.absolute()),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=file if number else terminal.for_rank,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=prepare,
                )
            ranks.append(Rank(number, process, log))
    except OSError as error:
        for rank in ranks:
            rank.kill_group()
        raise LaunchError(f"rank {len(ranks)} could not be started: {error}") from error
    terminal.rank_started()
    return ranks


def _dies_with_this_process() -> Callable[[], None] | None:
    """What a child calls before it becomes a rank: the kernel is to kill it when its parent dies, however that dies."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent, set_death_signal = os.getpid(), 1

    def prepare() -> None:
        libc.prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _free_port() -> int:
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LaunchError(f"no free port between {_PORTS.start} and {_PORTS.stop} for the ranks to meet at")


@contextlib.contextmanager
def _owned(log_dir: Path) -> Iterator[BinaryIO]:
    with (log_dir / ".launcher.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{log_dir} belongs to a run that is going on: stop it, or choose another run.name"
            raise LaunchError(message) from None
        yield lock


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the stopping signals in a list instead of dying of them. Ignored ones (nohup) stay ignored."""
    received: list[int] = []
    wanted = [number for number in _STOPPING if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, lambda got, _: received.append(got)) for number in wanted}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit_code(rank: Rank) -> int:
    assert rank.code is not None
    return rank.code if rank.code > 0 else 128 - rank.code


def _how(rank: Rank) -> str:
    if rank.code is None or rank.code >= 0:
        return f"exit code {rank.code}"
    name = signal.Signals(-rank.code).name
    return f"killed by {name}" + (": often the kernel, when memory runs out" if name == "SIGKILL" else "")
