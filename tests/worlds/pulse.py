"""A rank of a small World whose rank 0 works for a long time. Usage: pulse.py TIMEOUT_S WORK_S

A rank writes `pid_N` before it waits, and prints the result in the end. Rank 0 also writes `listening`, JSON with the
listening addresses of its process and of its parent.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from mrl import failure
from mrl.resilience import preemption
from mrl.resilience.rank import set_up_process


def listening(pid: int) -> list[str]:
    """Returns the local addresses, in /proc's hexadecimal form, of the process's listening TCP sockets."""
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


def main() -> None:
    preemption.close_on_signal()
    set_up_process()
    from mrl import platform
    from mrl.parallel import rank
    from mrl.trainers.shared.world import World

    timeout_s, work_s = map(float, sys.argv[1:])

    def work() -> str:
        time.sleep(work_s)
        return "the result"

    with failure.noted():
        platform.init_process_group(60.0)  # generous, because the ranks may arrive here at very different times
        world = World(timeout_s, 60.0, seed=1)
        if rank() == 0:
            Path("listening").write_text(json.dumps([listening(os.getpid()), listening(os.getppid())]))
        Path(f"pid_{rank()}").write_text(str(os.getpid()))
        print(world.from_main("waiting", work), flush=True)
        world.close()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        sys.exit(1)
    except KeyboardInterrupt:  # `mrl` itself ends this way
        sys.exit(130)
