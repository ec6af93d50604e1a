"""Engines that tests start themselves, without the seconds that their imports take: each is a copy of a process that
has imported what engines of its kind import. Engines of `mrl train` are programs, as ever.

    python -m tests.engine_copies PARENT_PID GRACE_S FOLDER COMMAND...    # in such a copy: mrl/rollout/supervisor.py
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from mrl.launcher.nursery import Order, live
from tests import zygote

SUPERVISOR = zygote.ROOT / "mrl/rollout/supervisor.py"
IMPORTS = {
    "sglang.launch_server": "tests.sglang_imports",
    "mrl.rollout.transformers_engine.server": "tests.transformers_engine_imports",
}
_READ_AT_START = (  # or set by what this process imports, and nothing to an engine on a CPU
    *("TMPDIR", "MRL_ENGINE_KEY", "GLOO_SOCKET_IFNAME", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"),
    *("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "SGLANG_CPU_OMP_THREADS_BIND", "CUDA_DEVICE_MAX_CONNECTIONS"),
)
_SAID_TO_ENGINES = ("SGLANG_", "MALLOC_", "OMP_", "TORCHDYNAMO_", "PYTHONPATH")
_PARENT_DEATH_SIGNAL = 1  # of prctl
_AT_FIRST = dict(os.environ)


def start(command: Sequence[str], env: Mapping[str, str], **more: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen` of an engine under its supervisor."""
    at = command.index(str(SUPERVISOR)) + 1 if str(SUPERVISOR) in command else len(command)
    python, _, *modules = [*command[at + 3 : at + 7], "", ""]
    module = next(filter(IMPORTS.__contains__, modules), None)
    changed = {name for name, value in env.items() if _AT_FIRST.get(name) != value} - {*_READ_AT_START}
    is_usual = all(name.startswith(_SAID_TO_ENGINES) for name in changed)
    if sys.platform != "linux" or python != sys.executable or module is None or not is_usual:
        return subprocess.Popen(command, env=env, **more)
    kept = frozenset((name, value) for name, value in env.items() if name not in _READ_AT_START)
    copy = [sys.executable, "-m", "tests.engine_copies", *command[at:]]
    return zygote.Copy(_zygote(IMPORTS[module], kept), copy, env=env, cwd=os.getcwd(), **more)


@cache
def _zygote(module: str, environment: frozenset[tuple[str, str]]) -> zygote.Zygote:
    env = dict(environment)
    path = [*env.get("PYTHONPATH", "").split(os.pathsep), str(zygote.ROOT)]
    return zygote.Zygote(module, env | {"PYTHONPATH": os.pathsep.join(filter(None, path))})


class _Forked:
    """As much of `subprocess.Popen` as a supervisor needs."""

    def __init__(self, command: Sequence[str], start_new_session: bool, preexec_fn: Callable[[], None]) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            preexec_fn()
            zygote.show_command(*command)
            tempfile.tempdir = None  # found by an import
            live(Order(command[2:], dict(os.environ), os.getcwd()))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, 0)  # which copies have: a supervisor ends its engine first
    supervise = runpy.run_path(str(SUPERVISOR))["main"]
    supervise.__globals__["subprocess"] = type("subprocess", (), {"Popen": _Forked})
    sys.exit(supervise(sys.argv))
