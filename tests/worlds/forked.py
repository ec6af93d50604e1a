"""Starts the ranks of a world: python forked.py NUMBER SCRIPT ARGUMENTS...

The ranks are forked from one process that has imported what they need, which saves each of them seconds. If one ends
with an error, the others are killed.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

import mrl.rank_imports  # noqa: F401
from mrl.forks import die_with_parent
from mrl.ports import free_port


def main() -> None:
    number, script, *arguments = sys.argv[1:]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": number}
    ranks: dict[int, int] = {}
    for rank in range(int(number)):
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os.environ |= address | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": number}
            sys.argv = [script, *arguments]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
            return
        ranks[pid] = rank
    wait(ranks)


def wait(ranks: dict[int, int]) -> None:
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main()
