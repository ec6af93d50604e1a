"""Launcher of one node of a multi-node world: one torchrun or ft_launcher a node, watched by `mrl train --nodes`.

The launchers meet at the head node. All output of the ranks goes to this node's output.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.launcher import signals
from mrl.launcher.elastic import ElasticJob, elastic_arguments
from mrl.launcher.logs import PREEMPTED_TEXT
from mrl.ports import address_towards, gloo_towards
from mrl.resilience.protocol import EXIT_PREEMPTED, FOLDER_VARIABLE, MARKER, RankStatus

_POLL_S = 0.1


@dataclass(frozen=True)
class NodeRank:
    """Number of a node among the nodes of a run. number: from 0, the head's. head: HOST:PORT, where node 0 listens for
    the others."""

    number: int
    count: int
    head: str

    @property
    def label(self) -> str:
        """Text for messages."""
        return f"node {self.number} of {self.count} ({os.uname().nodename})"


def launch_node(job: ElasticJob, run_dir: Path, node: NodeRank, grace_s: float = 30.0) -> int:
    """Runs this node's `job.nproc` ranks to their end and returns the exit code.

    The code is 0, EXIT_PREEMPTED if the run is to be resumed, 128 + the number of a signal that stopped it at once,
    else 1.

    run_dir: visible to all nodes. Stopping signals act as in `mrl.launcher.launch`; a warning may have reached the
    ranks already.
    """
    began = time.time()
    with signals.collect_signals() as received, tempfile.TemporaryDirectory(prefix="mrl-node-") as folder:
        process = _start(job, node, folder, grace_s)
        try:
            _watch(process, Path(folder), received, job.save_s, grace_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    warned = signals.preemption_signal(received, job.save_s is not None) is not None
    if received and not warned:
        _say(node, f"stopped by {signal.Signals(received[0]).name}; its ranks have ended")
        return 128 + received[0]
    marker = run_dir / MARKER
    if marker.exists() and marker.stat().st_mtime >= began - 1:  # allows for the clock of another machine
        _say(node, PREEMPTED_TEXT)
        return EXIT_PREEMPTED
    if warned and process.returncode:
        _say(node, f"asked to stop, and no checkpoint was saved in time; {PREEMPTED_TEXT}")
        return EXIT_PREEMPTED
    if process.returncode:
        _say(
            node,
            f"error: {job.kind} ended with exit code {process.returncode}: see the error above, or the output of the "
            "other nodes",
        )
    return 1 if process.returncode else 0


def _start(job: ElasticJob, node: NodeRank, folder: str, grace_s: float) -> subprocess.Popen[bytes]:
    """Starts the node's launcher. folder: private folder of this account, for sockets"""
    host, head = str(node.number == 0).lower(), node.head.rpartition(":")[0]
    meet = [f"--nnodes={node.count}", f"--rdzv-endpoint={node.head}"]
    if job.kind == "torchrun":
        meet += ["--rdzv-backend=static", f"--node-rank={node.number}"]
    else:  # ft_launcher has only this backend, and numbers the nodes itself
        meet += ["--rdzv-backend=c10d", f"--rdzv-conf=is_host={host}", f"--rdzv-id={node.head}"]
        meet += [f"--local-addr={address_towards(head)}"]
    own = ["-m", "mrl.launcher.agent", job.kind, *meet, *elastic_arguments(job, grace_s)]
    return subprocess.Popen(
        [sys.executable, *own, "-m", *job.arguments],
        env={
            **{"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **os.environ, **gloo_towards(head)},
            **{FOLDER_VARIABLE: folder, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        },
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=signals.child_setup(ignored=[signal.SIGUSR1]),
    )


def _watch(
    process: subprocess.Popen[bytes], folder: Path, received: Sequence[int], save_s: float | None, grace_s: float
) -> None:
    """Watches the launcher until it ends. A warning goes to the ranks directly; SIGINT follows at `end_at`, then
    SIGKILL."""
    end_at = kill_at = math.inf
    warned: set[int] = set()
    while process.poll() is None:
        time.sleep(_POLL_S)
        now, warning = time.monotonic(), signals.preemption_signal(received, save_s is not None)
        if warning is not None:
            end_at = min(end_at, now + (save_s or 0.0) + grace_s)
            for pid in set(_ranks(folder)) - warned:
                warned.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, warning)
        elif received:
            end_at = min(end_at, now)
        if now >= end_at and kill_at == math.inf:
            kill_at = now + grace_s
            process.send_signal(signal.SIGINT)
        if now >= kill_at or received.count(signal.SIGINT) > 1:
            process.kill()


def _ranks(folder: Path) -> Iterator[int]:
    """Process ids that the ranks of this node have written."""
    for file in folder.glob("rank_*.place"):
        yield RankStatus(**json.loads(file.read_text())).pid


def _say(node: NodeRank, text: str) -> None:
    print(f"mrl: {node.label}: {text}", file=sys.stderr, flush=True)
