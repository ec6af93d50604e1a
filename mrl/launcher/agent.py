"""torchrun, or nvidia-resiliency-ext's ft_launcher, for a node's ranks: `python -m mrl.launcher.agent torchrun|ft ...`.

Its store and its sockets unpickle what comes: they lie in a folder where nobody else can write or put another in their
place. ft_launcher's rank monitors, which it forks, end with it however it ends, and what they print goes to its log.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile

from mrl.ports import MEETING_VARIABLE
from mrl.resilience.rank import die_with_parent

FOLDER_VARIABLE = "MRL_LAUNCHER_FOLDER"  # its own; without one it is where the ranks meet
_PROGRAMS = {
    "torchrun": "torch.distributed.run",
    "ft": "nvidia_resiliency_ext.fault_tolerance.launcher",
}


def main() -> None:
    name = sys.argv.pop(1)
    tempfile.tempdir = os.environ.pop(FOLDER_VARIABLE, None) or os.environ[MEETING_VARIABLE]
    if name == "ft":
        os.register_at_fork(after_in_child=_become_a_monitor)
    importlib.import_module(_PROGRAMS[name]).main()


def _become_a_monitor() -> None:
    die_with_parent()
    os.dup2(2, 1)


if __name__ == "__main__":
    main()
