"""Runs torchrun or ft_launcher as the launcher of this machine's ranks, started and watched by `mrl train`.

On one machine ranks behave as under mrl's own launcher: rank 0's output goes to the terminal and to its log, the others
write to their logs, and an error is shown once. The output of torchrun or ft_launcher goes to a log of its own. As one
node of several, torchrun or ft_launcher meets the others at the head node, and all output goes to this node's output.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mrl.launcher import signals
from mrl.launcher.logs import LaunchError, RankLog, collect_failures, lock_log_dir, open_logs, root_cause
from mrl.launcher.restarts import RestartTracker
from mrl.launcher.world import FOR_RANKS, Supervised, Supervisor
from mrl.packages import pip_install_extra
from mrl.ports import MEETING_VARIABLE, address_towards, gloo_towards
from mrl.resilience.protocol import FOLDER_VARIABLE, LOG_DIR_VARIABLE, MARKER, read_statuses
from mrl.terminal import Terminal

_STOP_S = 2  # for ranks to end by themselves before a restart, with nothing to save


@dataclass(frozen=True)
class ElasticJob:
    """Job of torchrun or ft_launcher."""

    kind: Literal["torchrun", "ft"]
    arguments: Sequence[str]  # of `python -m`
    nproc: int
    max_restarts: int
    save_s: float | None  # seconds to save, None without saving
    limits: Mapping[str, float]  # seconds by section; torchrun has none
    ft_config: Path | None  # ft_launcher's file with these limits

    @property
    def program(self) -> str:
        return "ft_launcher" if self.kind == "ft" else self.kind


@dataclass(frozen=True)
class NodeRank:
    """Number of a node among the nodes of a run."""

    number: int  # from 0, the head's
    count: int
    head: str  # HOST:PORT, where node 0 listens for the others

    @property
    def label(self) -> str:
        return f"node {self.number} of {self.count} ({os.uname().nodename})"


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
            limits = (grace_s, math.inf, job.save_s)
            agent = _Agent(terminal, received, *limits, job, run_dir, log_dir, logs=logs, restarts=restarts)
            rendezvous = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
            env = {LOG_DIR_VARIABLE: str(log_dir.absolute()), MEETING_VARIABLE: meeting}
            with (log_dir / f"{job.program}.log").open("ab") as log:
                agent.start(rendezvous, {**FOR_RANKS, **os.environ, **env}, terminal.for_rank, log.fileno())
            return agent.run()


def launch_node(job: ElasticJob, run_dir: Path, node: NodeRank, grace_s: float = 30.0) -> int:
    """Runs this node's `job.nproc` ranks to their end; returns the exit code of `launch_elastic`.

    run_dir: visible to all nodes. A stopping signal may have reached the ranks already.
    """
    with (
        signals.collect_signals() as received,
        Terminal(Path(os.devnull)) as terminal,
        tempfile.TemporaryDirectory(prefix="mrl-node-") as folder,
    ):
        limits = (grace_s, math.inf, job.save_s)
        agent = _Agent(terminal, received, *limits, job, run_dir, Path(folder), node)
        agent.start(*node_rendezvous(job, node, folder))
        return agent.run()


def node_rendezvous(job: ElasticJob, node: NodeRank, folder: str) -> tuple[list[str], dict[str, str]]:
    """Returns the arguments of torchrun or ft_launcher by which the nodes meet, and the environment of this node's.

    folder: private folder of this account, for sockets and the process ids of the ranks
    """
    host = node.head.rpartition(":")[0]
    arguments = [f"--nnodes={node.count}", f"--rdzv-endpoint={node.head}"]
    if job.kind == "torchrun":
        arguments += ["--rdzv-backend=static", f"--node-rank={node.number}"]
    else:  # ft_launcher has only this backend, and numbers the nodes itself
        arguments += ["--rdzv-backend=c10d", f"--rdzv-conf=is_host={str(node.number == 0).lower()}"]
        arguments += [f"--rdzv-id={node.head}", f"--local-addr={address_towards(host)}"]
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return arguments, {**defaults, **os.environ, **gloo_towards(host), FOLDER_VARIABLE: folder}


@dataclass
class _Agent(Supervisor):
    """torchrun or ft_launcher, the only process. Ranks get a warning directly, since torchrun and ft_launcher would
    impose a time limit of their own.

    folder: where ranks write their process ids. node: None on one machine, which alone has logs and restarts
    """

    job: ElasticJob
    run_dir: Path
    folder: Path
    node: NodeRank | None = None
    logs: Sequence[RankLog] = ()
    restarts: RestartTracker | None = None
    began: float = field(init=False, default_factory=time.time)

    def start(
        self, rendezvous: Sequence[str], env: Mapping[str, str], stdout: int | None = None, stderr: int | None = None
    ) -> None:
        job, longest = self.job, math.ceil((self.save_s or 0.0) + self.grace_s)
        command = [sys.executable, "-m", "mrl.launcher.agent", job.kind, *rendezvous, f"--nproc-per-node={job.nproc}"]
        if job.kind == "torchrun":
            command += ["--max-restarts=0", f"--shutdown-timeout={longest}"]
        else:
            command += [f"--max-restarts={job.max_restarts}", f"--term-timeout={longest}"]
            command += [f"--workers-stop-timeout={_STOP_S}", "--monitor-interval=0.1"]
            command += ["--ft-enable-nic-monitor=false", f"--ft-cfg-path={job.ft_config}"]
        command += ["-m", *job.arguments]
        env = {**env, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # torchrun's would be open to every account
        self.processes.append(Supervised(signals.start_program(command, env, stdout, stderr, ignored=[signal.SIGUSR1])))
        self.terminal.rank_started()

    def look(self, is_over: bool) -> None:
        if self.restarts is not None:
            self.restarts.finish() if is_over else self.restarts.poll()

    def say(self, text: str) -> None:
        super().say(f"{self.node.label}: {text}" if self.node is not None else text)

    def ranks(self) -> list[int]:
        return [status.pid for status in read_statuses(self.folder) if not status.ended]

    def is_preempted(self) -> bool:
        marker = self.run_dir / MARKER
        is_marked = marker.exists() and marker.stat().st_mtime >= self.began - 1  # by the clock of another machine
        return is_marked or (self.warning is not None and self.processes[0].code != 0)

    def report(self) -> int:
        code = self.processes[0].code
        if code == 0:
            return 0
        fault = self.restarts.fault if self.restarts is not None else None
        cause = root_cause(collect_failures(self.logs, self.terminal), killed=fault is not None)
        if cause is not None:
            self.say_failure(cause, self.logs[cause[0]])
        elif fault is not None:
            self.say(f"error: {fault.text}")
            self.say(f"details: {self.logs[min(fault.ranks)].path}")
        elif self.logs:
            log = self.folder / f"{self.job.program}.log"
            self.say(f"error: {self.job.program} ended with exit code {code}; its log: {log}")
        else:
            elsewhere = "see the error above, or the output of the other nodes"
            self.say(f"error: {self.job.kind} ended with exit code {code}: {elsewhere}")
        return 1
