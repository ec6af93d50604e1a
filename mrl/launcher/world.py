"""mrl's own launcher, which starts the ranks of one machine itself.

Every rank leads its own process group, and the kernel kills it when the launcher dies (Linux). Rank 0's output goes to
the terminal, as it comes, and to its log; the others write to their logs.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl import failure
from mrl.failure import Failure
from mrl.launcher import signals
from mrl.launcher.environment import FOR_RANKS
from mrl.launcher.fork_server import IMPORTS_S, Child, ForkServer
from mrl.launcher.logs import (
    PREEMPTED_TEXT,
    LaunchError,
    RankLog,
    collect_failures,
    lock_log_dir,
    open_logs,
    root_cause,
    show_failure,
)
from mrl.ports import MEETING_VARIABLE
from mrl.resilience.protocol import EXIT_PREEMPTED
from mrl.terminal import Terminal

_POLL_S = 0.05


@dataclass
class RankProcess:
    """A rank's process; `code` is its exit code, or minus the signal that killed it."""

    number: int
    process: subprocess.Popen[bytes] | Child
    log: RankLog
    code: int | None = None

    def poll(self) -> bool:
        """True if the rank has ended. Its remaining children are killed before the process id can be reused."""
        if self.code is None and os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.kill_group()
            self.code = self.process.wait()
        return self.code is not None

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; a stopped process is continued to receive it."""
        if self.code is None:
            os.kill(self.process.pid, number)
            os.kill(self.process.pid, signal.SIGCONT)

    def is_stopped(self) -> bool:
        """True if SIGSTOP, SIGTSTP or a debugger has stopped the process (Linux)."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
        return False

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
    save_s: float | None = None,
    fork_server: ForkServer | None = None,
) -> int:
    """Runs `command` as ranks 0..nproc-1 of one world; returns 0, or the exit code of the first rank that failed.

    fork_server: fork server that starts the ranks if it can, and is then closed

    After a failure the other ranks get `settle_s` seconds to report the same error and end by themselves, then SIGINT,
    and `grace_s` later SIGKILL with all their children. SIGKILL comes `settle_s` after rank 0, which has the most to
    close, has ended, since a rank that waits in gloo for an ended one never notices. SIGINT and SIGHUP here end the
    ranks in the same way (a second SIGINT at once) and return 128 + the signal's number. So do SIGTERM and SIGUSR1,
    unless ranks can save: then ranks get that signal and `save_s` more seconds, and the exit code is EXIT_PREEMPTED.

    Logs: log_dir/rank_N.log, appended to. Raises LaunchError if another launcher writes there.
    """
    with lock_log_dir(log_dir), signals.collect_signals() as received:
        logs = open_logs(log_dir, nproc, command)
        with Terminal(logs[0].path) as terminal, tempfile.TemporaryDirectory(prefix="mrl-world-") as meeting:
            shared = {**(os.environ if env is None else env), MEETING_VARIABLE: meeting}
            if fork_server:
                _wait_for(fork_server, received)
            ranks = _start(command, logs, shared, terminal, fork_server)
            return _World(ranks, grace_s, settle_s, save_s, terminal).wait(received)


class _World:
    """The ranks, with the times of their end: SIGINT at `end_at`, SIGKILL at `kill_at`."""

    def __init__(
        self, ranks: list[RankProcess], grace_s: float, settle_s: float, save_s: float | None, terminal: Terminal
    ) -> None:
        self.ranks, self.grace_s, self.settle_s, self.save_s, self.terminal = ranks, grace_s, settle_s, save_s, terminal
        self.failed: RankProcess | None = None
        self.stopped: list[RankProcess] = []  # ranks stopped when the first one failed
        self.end_at = self.kill_at = math.inf
        self.sent: signal.Signals | None = None

    def wait(self, received: Sequence[int]) -> int:
        """Returns the exit code. `received`: stopping signals so far, filled in by the signal handler."""
        try:
            while self._running():
                self.terminal.pump(_POLL_S)
                self._note_failure()
                self._stop_if_due(received)
        finally:
            self.kill()
        self.terminal.drain()
        self._note_failure()
        return self._outcome(received)

    def _outcome(self, received: Sequence[int]) -> int:
        warned = signals.preemption_signal(received, self.save_s is not None) is not None
        if received and not warned:
            self.terminal.say(f"stopped by {signal.Signals(received[0]).name}; all ranks have ended")
            return 128 + received[0]
        if self.failed is None:
            return 0
        failures = collect_failures([rank.log for rank in self.ranks], self.terminal)
        found = root_cause(failures, killed=warned or (self.failed.code or 0) < 0)
        if any(rank.code == EXIT_PREEMPTED for rank in self.ranks) or (warned and found is None):
            self.terminal.say(PREEMPTED_TEXT)
            return EXIT_PREEMPTED
        self._report(self.failed, found)
        return _exit_code(self.failed)

    def _running(self) -> int:
        return sum(not rank.poll() for rank in self.ranks)

    def _note_failure(self) -> None:
        """Picks the first failure among ranks that failed together: a killed rank, or the rank that stopped writing
        first."""
        failed = [rank for rank in self.ranks if rank.code]
        if failed and self.failed is None:
            self.failed = min(failed, key=lambda rank: ((rank.code or 0) > 0, rank.log.last_written()))
            self.stopped = [rank for rank in self.ranks if rank.is_stopped()]
            self.end_at = time.monotonic() + self.settle_s

    def _stop_if_due(self, received: Sequence[int]) -> None:
        now = time.monotonic()
        warning = signals.preemption_signal(received, self.save_s is not None) if now < self.end_at else None
        wanted = warning or (signal.SIGINT if received or now >= self.end_at else None)
        if wanted is not None and self.sent not in (wanted, signal.SIGINT):
            self.sent = wanted
            self.kill_at = now + self.grace_s + ((self.save_s or 0.0) if warning else 0.0)
            for rank in self.ranks:
                rank.signal(wanted)
        if self.sent == signal.SIGINT and self.ranks[0].code is not None:
            self.kill_at = min(self.kill_at, now + self.settle_s)
        if now >= self.kill_at or received.count(signal.SIGINT) > 1:
            self.kill()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill_group()

    def _report(self, first: RankProcess, found: tuple[int, Failure] | None) -> None:
        if self.stopped and (found is None or found[1].lost_contact):
            names = " and ".join(f"rank {rank.number}" for rank in self.stopped)
            self.terminal.say(f"error: {names} had been paused (SIGSTOP or a debugger), and the other ranks timed out")
            self.terminal.say(f"details: {first.log.path}")
        elif found is None:
            self._report_silent(first)
        else:
            show_failure(found, self.ranks[found[0]].log, self.terminal)

    def _report_silent(self, first: RankProcess) -> None:
        """Reports ranks that wrote no failure file."""
        self.terminal.say(f"error: rank {first.number} failed first ({_exit_text(first)}); its log: {first.log.path}")
        if first.number and first.code != -signal.SIGKILL:
            self.terminal.say(first.log.tail(), prefix="")
        for rank in self.ranks:
            if rank is not first and rank.code:
                self.terminal.say(f"rank {rank.number} ended too ({_exit_text(rank)}); its log: {rank.log.path}")


def _start(
    command: Sequence[str],
    logs: Sequence[RankLog],
    env: Mapping[str, str],
    terminal: Terminal,
    fork_server: ForkServer | None,
) -> list[RankProcess]:
    shared = {
        **{**FOR_RANKS, "PYTHONUNBUFFERED": "1", **env},
        **{"WORLD_SIZE": str(len(logs)), "LOCAL_WORLD_SIZE": str(len(logs))},
    }
    ranks: list[RankProcess] = []
    try:
        for number, log in enumerate(logs):
            own = {"RANK": str(number), "LOCAL_RANK": str(number)}
            own[failure.FILE_VARIABLE] = str(log.failure_file.absolute())
            with log.path.open("ab") as file, open(os.devnull, "rb") as nothing:
                out = file.fileno() if number else terminal.for_rank
                files = (nothing.fileno(), out, out)
                made = fork_server.start(command, {**shared, **own}, files) if fork_server else None
                ranks.append(RankProcess(number, made or _start_program(command, {**shared, **own}, files), log))
    except OSError as error:
        for rank in ranks:
            rank.kill_group()
        raise LaunchError(f"rank {len(ranks)} could not be started: {error}") from error
    finally:
        if fork_server:
            fork_server.close()
    terminal.rank_started()
    return ranks


def _wait_for(fork_server: ForkServer, received: Sequence[int]) -> None:
    """Waits for the fork server; gives it up on a stopping signal or after IMPORTS_S seconds."""
    end = time.monotonic() + IMPORTS_S
    while not fork_server.is_settled(_POLL_S):
        if received or time.monotonic() > end:
            fork_server.close()


def _start_program(
    command: Sequence[str], env: Mapping[str, str], files: tuple[int, int, int]
) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = files
    return subprocess.Popen(
        command,
        env=env,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=signals.child_setup(),
    )


def _exit_code(rank: RankProcess) -> int:
    assert rank.code is not None
    return rank.code if rank.code > 0 else 128 - rank.code


def _exit_text(rank: RankProcess) -> str:
    if rank.code is None or rank.code >= 0:
        return f"exit code {rank.code}"
    name = signal.Signals(-rank.code).name
    return f"killed by {name}" + (", often by the kernel when memory runs out" if name == "SIGKILL" else "")
