"""Runs torchrun or nvidia-resiliency-ext's ft_launcher for a node: `python -m mrl.launcher.agent torchrun|ft ...`.

Their store and sockets unpickle what they receive, so they lie in a folder where no other account can write. The rank
monitors that ft_launcher forks end with it however it ends, and their output goes to its log. A fork server starts the
ranks, after a restart too.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from mrl.forks import die_with_parent
from mrl.launcher.fork_server import Child, ForkServer
from mrl.ports import MEETING_VARIABLE
from mrl.resilience.protocol import FOLDER_VARIABLE

_PROGRAMS = {
    "torchrun": "torch.distributed.run",
    "ft": "nvidia_resiliency_ext.fault_tolerance.launcher",
}
_STARTERS = {  # modules in which they start ranks
    "torchrun": "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "ft": "nvidia_resiliency_ext.fault_tolerance._torch_elastic_compat.multiprocessing.subprocess_handler"
    ".subprocess_handler",
}
_MONITOR_STATES = "nvidia_resiliency_ext.fault_tolerance.rank_monitor_state_machine"


def main() -> None:
    name = sys.argv.pop(1)
    fork_server = ForkServer()
    tempfile.tempdir = os.environ.get(FOLDER_VARIABLE) or os.environ[MEETING_VARIABLE]
    if name == "ft":
        os.register_at_fork(after_in_child=_become_a_monitor)
        _let_restarts_restart()
    handler = importlib.import_module(_STARTERS[name]).SubprocessHandler
    handler._popen = functools.partialmethod(_start, fork_server, handler._popen)
    importlib.import_module(_PROGRAMS[name]).main()
    fork_server.close()


def _start(
    handler: Any, fork_server: ForkServer, otherwise: Any, command: Sequence[str], env: dict[str, str]
) -> Child | subprocess.Popen[bytes]:
    """Starts a rank for torchrun or ft_launcher, which never redirect its output."""
    return fork_server.start(command, env, (0, 1, 2)) or otherwise(handler, command, env)


def _let_restarts_restart() -> None:
    """Fixes the monitor of a restarted rank that ends before its first section.

    Without the fix, the monitor ignores later connections, and every further restart fails.
    """
    machine: Any = importlib.import_module(_MONITOR_STATES).RankMonitorStateMachine
    lost = machine.handle_ipc_connection_lost

    def still_restarting(self: Any) -> None:
        if not self.is_restarting():
            lost(self)

    machine.handle_ipc_connection_lost = still_restarting


def _become_a_monitor() -> None:
    die_with_parent()
    os.dup2(2, 1)


if __name__ == "__main__":
    main()
