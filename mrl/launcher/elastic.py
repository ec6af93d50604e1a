"""Runs torchrun or ft_launcher as the launcher of this machine's ranks, started and watched by `mrl train`.

Ranks behave as under mrl's own launcher: rank 0's output goes to the terminal and to its log, the others write to their
logs, and an error is shown once. The output of torchrun or ft_launcher goes to a log of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mrl.launcher import signals
from mrl.launcher.environment import FOR_RANKS
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
from mrl.launcher.restarts import RestartTracker
from mrl.packages import pip_install_extra
from mrl.ports import MEETING_VARIABLE
from mrl.resilience.protocol import EXIT_PREEMPTED, LOG_DIR_VARIABLE, MARKER
from mrl.terminal import Terminal

_POLL_S = 0.1
_STOP_S = 2  # for ranks to end by themselves before a restart, with nothing to save
_NAMES = {"torchrun": "torchrun", "ft": "ft_launcher"}


@dataclass(frozen=True)
class ElasticJob:
    """Job of torchrun or ft_launcher. arguments: of `python -m`. save_s: seconds to save, None without saving.

    limits: seconds by section; ft_config: ft_launcher's file with these limits. torchrun has neither
    """

    kind: Literal["torchrun", "ft"]
    arguments: Sequence[str]
    nproc: int
    max_restarts: int
    save_s: float | None
    limits: Mapping[str, float]
    ft_config: Path | None


def missing(launcher: str) -> str | None:
    """Returns which package `run.launcher` lacks, with the command that installs it; None if nothing is missing."""
    if launcher != "ft" or importlib.util.find_spec("nvidia_resiliency_ext") is not None:
        return None
    return f"run.launcher: ft needs nvidia-resiliency-ext: {pip_install_extra('resilience')}"


def launch_elastic(job: ElasticJob, run_dir: Path, grace_s: float = 30.0) -> int:
    """Runs the job to its end; returns the exit code of `launch`, or 1 after one failure of the ranks too many.

    Raises LaunchError if another launcher writes there, or ft_launcher is not installed.
    """
    if (problem := missing(job.kind)) is not None:
        raise LaunchError(problem)
    log_dir = run_dir / "logs"
    with lock_log_dir(log_dir), signals.collect_signals() as received:
        logs = open_logs(log_dir, job.nproc, job.arguments)
        with Terminal(logs[0].path) as terminal, tempfile.TemporaryDirectory(prefix="mrl-world-") as meeting:
            restarts = RestartTracker(logs, job.limits, job.max_restarts, log_dir / "restarts.jsonl", terminal)
            process = _start(job, log_dir, meeting, grace_s, terminal)
            return _Watch(job, process, logs, restarts, run_dir, grace_s, terminal).wait(received)


class _Watch:
    """Watches the launcher process until it ends, which gets SIGINT at `end_at` and SIGKILL at `kill_at`."""

    def __init__(
        self,
        job: ElasticJob,
        process: subprocess.Popen[bytes],
        logs: Sequence[RankLog],
        restarts: RestartTracker,
        run_dir: Path,
        grace_s: float,
        terminal: Terminal,
    ) -> None:
        self.job, self.process, self.logs, self.restarts = job, process, logs, restarts
        self.run_dir, self.grace_s, self.terminal = run_dir, grace_s, terminal
        self.began = time.time()
        self.end_at = self.kill_at = math.inf
        self.warned: set[int] = set()

    def wait(self, received: Sequence[int]) -> int:
        """Returns the exit code. `received`: stopping signals so far, filled in by the signal handler."""
        try:
            while self.process.poll() is None:
                self.terminal.pump(_POLL_S)
                self.restarts.poll()
                self._stop_if_due(received)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # includes the monitors
            self.process.wait()
        self.terminal.drain()
        self.restarts.finish()
        return self._outcome(received)

    def _stop_if_due(self, received: Sequence[int]) -> None:
        """Stops the job if due. A warning goes to the ranks directly, since the launcher would impose a time limit of
        its own."""
        now = time.monotonic()
        warning = signals.preemption_signal(received, self.job.save_s is not None)
        if warning is not None:
            self._warn(warning, now)
        elif received:
            self.end_at = min(self.end_at, now)
        if now >= self.end_at and self.kill_at == math.inf:
            self.kill_at = now + self.grace_s
            self.process.send_signal(signal.SIGINT)
        if now >= self.kill_at or received.count(signal.SIGINT) > 1:
            self.process.kill()  # the kernel then kills the ranks

    def _warn(self, number: signal.Signals, now: float) -> None:
        if not self.warned:
            self.end_at = now + (self.job.save_s or 0.0) + self.grace_s
        for status in self.restarts.statuses:
            if not status.ended and status.pid not in self.warned:
                self.warned.add(status.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status.pid, number)

    def _outcome(self, received: Sequence[int]) -> int:
        warned = signals.preemption_signal(received, self.job.save_s is not None) is not None
        if received and not warned:
            self.terminal.say(f"stopped by {signal.Signals(received[0]).name}; all ranks have ended")
            return 128 + received[0]
        marker = self.run_dir / MARKER
        if (warned and self.process.returncode) or (marker.exists() and marker.stat().st_mtime >= self.began):
            self.terminal.say(PREEMPTED_TEXT)
            return EXIT_PREEMPTED
        if self.process.returncode == 0:
            return 0
        self._report()
        return 1

    def _report(self) -> None:
        found = root_cause(collect_failures(self.logs, self.terminal), killed=self.restarts.fault is not None)
        if found is not None:
            show_failure(found, self.logs[found[0]], self.terminal)
        elif self.restarts.fault is not None:
            fault = self.restarts.fault
            self.terminal.say(f"error: {fault.text}")
            self.terminal.say(f"details: {self.logs[min(fault.ranks)].path}")
        else:
            log = _log(self.job, self.run_dir / "logs")
            self.terminal.say(f"error: {log.stem} ended with exit code {self.process.returncode}; its log: {log}")


def _start(job: ElasticJob, log_dir: Path, meeting: str, grace_s: float, terminal: Terminal) -> subprocess.Popen[bytes]:
    """Starts the launcher. meeting: private folder of this account, for stores and sockets"""
    environment = {
        **{**FOR_RANKS, **os.environ},
        **{LOG_DIR_VARIABLE: str(log_dir.absolute()), MEETING_VARIABLE: meeting},
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun's shared store would be open to every account
    }
    own = ["-m", "mrl.launcher.agent", job.kind, "--nnodes=1"]
    own += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
    own += elastic_arguments(job, grace_s)
    with _log(job, log_dir).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *own, "-m", *job.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=terminal.for_rank,
            stderr=log,
            start_new_session=True,
            preexec_fn=signals.child_setup(ignored=[signal.SIGUSR1]),
        )
    terminal.rank_started()
    return process


def elastic_arguments(job: ElasticJob, grace_s: float) -> list[str]:
    """Returns the arguments of torchrun or ft_launcher for the job, except the rendezvous."""
    longest = math.ceil((job.save_s or 0.0) + grace_s)
    told = [f"--nproc-per-node={job.nproc}"]
    if job.kind == "torchrun":
        return [*told, "--max-restarts=0", f"--shutdown-timeout={longest}"]
    told += [f"--max-restarts={job.max_restarts}", f"--term-timeout={longest}"]
    told += [f"--workers-stop-timeout={_STOP_S}", "--monitor-interval=0.1"]
    return [*told, "--ft-enable-nic-monitor=false", f"--ft-cfg-path={job.ft_config}"]


def _log(job: ElasticJob, log_dir: Path) -> Path:
    return log_dir / f"{_NAMES[job.kind]}.log"
