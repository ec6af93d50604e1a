"""Fork servers for the engines of all tests, including engines that a tested program starts. A server does its imports
when the first engine of its kind is started.

    python -m tests.helpers.engine_fork_servers FOLDER    # runs until its stdin is closed
"""

from __future__ import annotations

import atexit
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from mrl.config.engines import ENGINES
from mrl.forks import BACKLOG, serve
from mrl.inference import fork_server

ROOT = Path(__file__).parents[2]


def start() -> None:
    """Starts the fork servers for this process and its children, if there are none. They end with this process."""
    if sys.platform != "linux" or fork_server.VARIABLE in os.environ:
        return
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as in a run; without it no engine would be forked
    folder = tempfile.mkdtemp(prefix="mrl-engines-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pipe, ours = subprocess.PIPE, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.helpers.engine_fork_servers", folder]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | ours, stdin=pipe, stdout=pipe, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline()
    os.environ[fork_server.VARIABLE] = folder
    atexit.register(process.communicate)


def main(folder: Path) -> None:
    waiting = dict[socket.socket, str]()
    for engine, kind in ENGINES.items():
        if kind.cpu_imports is not None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(folder / engine))
            listener.listen(BACKLOG)
            waiting[listener] = kind.cpu_imports
    print("ready", flush=True)
    while sys.stdin not in (ready := select.select([sys.stdin, *waiting], [], [])[0]):
        for listener in ready:
            imports = waiting.pop(listener)
            if os.fork() == 0:
                for other in waiting:
                    other.close()
                serve(listener, imports, fork_server.become_supervisor)
            listener.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
