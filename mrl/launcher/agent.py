"""Runs torchrun or nvidia-resiliency-ext's ft_launcher for a node: `python -m mrl.launcher.agent torchrun|ft ...`.

Their store and sockets unpickle what they receive, so they lie in a folder where no other account can write. The rank
monitors that ft_launcher forks end with it however it ends, and their output goes to its log. A fork server starts the
ranks, after a restart too.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from typing import Any

from mrl.forks import die_with_parent
from mrl.launcher.fork_server import RankForkServer
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
    tempfile.tempdir = os.environ.get(FOLDER_VARIABLE) or os.environ[MEETING_VARIABLE]
    with RankForkServer() as fork_server:
        if name == "ft":
            os.register_at_fork(after_in_child=_become_a_monitor)
            _let_restarts_restart()
        handler = importlib.import_module(_STARTERS[name]).SubprocessHandler
        as_program = handler._popen
        handler._popen = lambda self, command, env: (  # they never redirect the output of ranks
            fork_server.start(command, env, (0, 1, 2)) or as_program(self, command, env)
        )
        importlib.import_module(_PROGRAMS[name]).main()


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
