"""Supervises the processes of a run on this machine, and starts its ranks for `run.launcher: mrl`.

Every process leads its own process group, and the kernel kills it when the launcher dies (Linux). Rank 0's output goes
to the terminal, as it comes, and to its log; the others write to their logs.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mrl import failure
from mrl.failure import Failure
from mrl.launcher import signals
from mrl.launcher.fork_server import Child, RankForkServer
from mrl.launcher.logs import (
    PREEMPTED_TEXT,
    LaunchError,
    RankLog,
    collect_failures,
    lock_log_dir,
    open_logs,
    root_cause,
)
from mrl.ports import MEETING_VARIABLE
from mrl.resilience.protocol import EXIT_PREEMPTED
from mrl.terminal import Terminal

FOR_RANKS = {  # environment variables, unless the user sets them
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # see mrl/platform/adaptations.py, which may run after the driver has started
}
POLL_S = 0.05


@dataclass
class Supervised:
    """A process; `code` is its exit code, or minus the signal that killed it."""

    process: subprocess.Popen[bytes] | Child
    code: int | None = None

    def poll(self) -> bool:
        """True if the process has ended. Its remaining children are killed before the process id can be reused."""
        if self.code is None and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.kill_group()
            self.code = self.process.wait()
        return self.code is not None

    def is_stopped(self) -> bool:
        """True if SIGSTOP, SIGTSTP or a debugger has stopped the process."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def kill_group(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@dataclass
class Supervisor:
    """Waits for the end of a run's processes on this machine, and ends them when a signal or a failure asks for it.

    SIGINT and SIGHUP here end the processes: they get SIGINT at `end_at`, and `grace_s` later SIGKILL with all their
    children (after a second SIGINT at once). SIGKILL comes `settle_s` after the first process, which has the most to
    close, has ended, since a rank that waits in gloo for an ended one never notices. SIGTERM and SIGUSR1 do the same,
    unless ranks can save (`save_s` is not None): then the ranks get that signal, and `end_at` is `save_s` + `grace_s`
    later.

    received: stopping signals so far, filled in by the signal handler
    """

    terminal: Terminal
    received: Sequence[int]
    grace_s: float
    settle_s: float
    save_s: float | None
    processes: list[Supervised] = field(init=False, default_factory=list)
    end_at: float = field(init=False, default=math.inf)
    kill_at: float = field(init=False, default=math.inf)
    _warned: set[int] = field(init=False, default_factory=set)

    def look(self, is_over: bool) -> None:
        """Notes what has happened. is_over: all processes have ended"""

    def ranks(self) -> list[int]:
        """Returns the process ids of the living ranks, as far as they are known."""
        raise NotImplementedError

    def is_preempted(self) -> bool:
        """True if the run has ended before its last step, without an error, and is to be resumed."""
        raise NotImplementedError

    def report(self) -> int:
        """Shows the one error of the run, if there is one; returns the exit code."""
        raise NotImplementedError

    def run(self) -> int:
        """Blocks until all processes have ended; returns the exit code of the run.

        The code is 128 + the signal's number after a signal that ended the ranks, and EXIT_PREEMPTED if the run is to
        be resumed.
        """
        try:
            while sum(not process.poll() for process in self.processes):
                self.terminal.pump(POLL_S)
                self.look(is_over=False)
                self._signal_if_due()
        finally:
            self.kill()
        self.terminal.drain()
        self.look(is_over=True)
        if self.received and not self.warning:
            self.say(f"stopped by {signal.Signals(self.received[0]).name}; all ranks have ended")
            return 128 + self.received[0]
        if self.is_preempted():
            self.say(PREEMPTED_TEXT)
            return EXIT_PREEMPTED
        return self.report()

    @property
    def warning(self) -> signal.Signals | None:
        """Signal that tells ranks to save and leave; None if there is none, or they must end at once."""
        if self.save_s is None or any(number in signals.AT_ONCE for number in self.received):
            return None
        return signal.Signals(self.received[0]) if self.received else None

    def _signal_if_due(self) -> None:
        now = time.monotonic()
        if self.warning and now < self.end_at:
            self.end_at = min(self.end_at, now + (self.save_s or 0.0) + self.grace_s)
            new = set(self.ranks()) - self._warned  # a rank may have just been restarted
            _send(self.warning, new)
            self._warned |= new
        elif self.received:
            self.end_at = min(self.end_at, now)
        if now >= self.end_at and self.kill_at == math.inf:
            self.kill_at = now + self.grace_s
            _send(signal.SIGINT, [process.process.pid for process in self.processes if process.code is None])
        if self.kill_at < math.inf and self.processes[0].code is not None:
            self.kill_at = min(self.kill_at, now + self.settle_s)
        if now >= self.kill_at or self.received.count(signal.SIGINT) > 1:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill_group()

    def say(self, text: str) -> None:
        self.terminal.say(text)

    def say_failure(self, cause: tuple[int, Failure], log: RankLog) -> None:
        """Shows the one error to the user. log: of the rank with that error"""
        self.say(f"error: {cause[1].message}")
        self.say(f"details: {log.path}")


def _send(number: signal.Signals, pids: Collection[int]) -> None:
    """Sends a signal; a stopped process is continued to receive it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)


def launch(
    command: Sequence[str],
    nproc: int,
    log_dir: Path,
    grace_s: float = 30.0,
    settle_s: float = 5.0,
    save_s: float | None = None,
    fork_server: RankForkServer | None = None,
    wrapped: Mapping[int, Sequence[str]] | None = None,
) -> int:
    """Runs `command` as ranks 0..nproc-1 of one world; returns 0, or the exit code of the first rank that failed.

    fork_server: fork server that starts the ranks if it can, and is then closed
    wrapped: words before the command of some ranks, which no fork server starts

    After a failure the other ranks get `settle_s` seconds to report the same error and end by themselves, before they
    are ended as after SIGINT (see Supervisor, also for other exit codes).

    Logs: log_dir/rank_N.log, appended to. Raises LaunchError if another launcher writes there.
    """
    with lock_log_dir(log_dir), signals.collect_signals() as received:
        logs = open_logs(log_dir, nproc, command)
        with Terminal(logs[0].path) as terminal, tempfile.TemporaryDirectory(prefix="mrl-world-") as meeting:
            ranks = _Ranks(terminal, received, grace_s, settle_s, save_s, logs)
            ranks.start(command, meeting, fork_server, wrapped or {})
            return ranks.run()


@dataclass
class _Ranks(Supervisor):
    """The ranks as processes of this launcher; rank N writes to logs[N].

    failed: the first rank that failed. stopped: ranks stopped then. cause: the error that explains the others
    """

    logs: Sequence[RankLog]
    failed: int | None = field(init=False, default=None)
    stopped: list[int] = field(init=False, default_factory=list)
    cause: tuple[int, Failure] | None = field(init=False, default=None)

    def start(
        self,
        command: Sequence[str],
        meeting: str,
        fork_server: RankForkServer | None,
        wrapped: Mapping[int, Sequence[str]],
    ) -> None:
        """Starts the ranks. meeting: private folder of this account, for their rendezvous"""
        world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(self.logs)))
        shared = {**FOR_RANKS, "PYTHONUNBUFFERED": "1", **os.environ, **world, MEETING_VARIABLE: meeting}
        try:
            for number, log in enumerate(self.logs):
                own = {**shared, "RANK": str(number), "LOCAL_RANK": str(number)}
                own[failure.FILE_VARIABLE] = str(log.failure_file.absolute())
                with log.path.open("ab") as file, open(os.devnull, "rb") as nothing:
                    out = file.fileno() if number else self.terminal.for_rank
                    words, made = [*wrapped.get(number, ()), *command], None
                    if fork_server is not None and number not in wrapped:
                        made = fork_server.start(words, own, (nothing.fileno(), out, out))
                    self.processes.append(Supervised(made or signals.start_program(words, own, out, out)))
        except OSError as error:
            self.kill()
            raise LaunchError(f"rank {len(self.processes)} could not be started: {error}") from error
        finally:
            if fork_server:
                fork_server.close()
        self.terminal.rank_started()

    def ranks(self) -> list[int]:
        return [rank.process.pid for rank in self.processes if rank.code is None]

    def look(self, is_over: bool) -> None:
        """Picks the first failure among ranks that failed together: a killed rank, or the rank that stopped writing
        first."""
        failed = [number for number, rank in enumerate(self.processes) if rank.code]
        if failed and self.failed is None:
            self.failed = min(failed, key=lambda rank: (self._code(rank) > 0, self.logs[rank].last_written()))
            self.stopped = [number for number, rank in enumerate(self.processes) if rank.is_stopped()]
            self.end_at = min(self.end_at, time.monotonic() + self.settle_s)

    def _code(self, rank: int) -> int:
        return self.processes[rank].code or 0

    def is_preempted(self) -> bool:
        if self.failed is None:
            return False
        failures = collect_failures(self.logs, self.terminal)
        self.cause = root_cause(failures, killed=self.warning is not None or self._code(self.failed) < 0)
        is_left = any(rank.code == EXIT_PREEMPTED for rank in self.processes)
        return is_left or (self.warning is not None and self.cause is None)

    def report(self) -> int:
        if self.failed is None:
            return 0
        code, cause = self._code(self.failed), self.cause
        if self.stopped and (cause is None or cause[1].lost_contact):
            names = " and ".join(f"rank {rank}" for rank in self.stopped)
            self.say(f"error: {names} had been paused (SIGSTOP or a debugger), and the other ranks timed out")
            self.say(f"details: {self.logs[self.failed].path}")
        elif cause is not None:
            self.say_failure(cause, self.logs[cause[0]])
        else:  # the rank wrote no failure file
            log = self.logs[self.failed]
            self.say(f"error: rank {self.failed} failed first ({_exit_text(code)}); its log: {log.path}")
            if self.failed and code != -signal.SIGKILL:
                self.terminal.say(log.tail(), prefix="")
            for rank, other in enumerate(self.logs):
                if rank != self.failed and self._code(rank):
                    self.say(f"rank {rank} ended too ({_exit_text(self._code(rank))}); its log: {other.path}")
        return code if code > 0 else 128 - code


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}" + (", often by the kernel when memory runs out" if name == "SIGKILL" else "")
