"""No process of an engine survives its close, its crash, or the death of the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.inference.errors import EngineStartError
from mrl.inference.launch import Launch
from mrl.inference.process import EngineProcess
from mrl.ports import free_port

# An "engine" with a child that ignores SIGTERM and has left the session, and a grandchild orphaned to nobody.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
sleeper = [sys.executable, "-S", "-c", sleep]
child = subprocess.Popen(sleeper, start_new_session=True)
middle = os.fork()
if middle == 0:
    orphan = subprocess.Popen(sleeper, start_new_session=True)
    open(sys.argv[1] + ".tmp", "w").write(f"{os.getppid()} {child.pid} {orphan.pid}")
    os.rename(sys.argv[1] + ".tmp", sys.argv[1])
    os._exit(0)
print("engine is up", flush=True)
time.sleep(600 if sys.argv[2] == "stay" else 0.5)
sys.exit(7)
"""


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")


def pids_of(file: Path) -> list[int]:
    assert wait_until(file.exists, 60), "the stub engine did not start"
    return [int(pid) for pid in file.read_text().split()]


def launching(command: list[str]) -> Callable[[Path], Launch]:
    return lambda folder: Launch(command, dict(os.environ))


def start(tmp_path: Path, how: str) -> tuple[EngineProcess, list[int]]:
    command = [sys.executable, "-S", "-c", STUBBORN, str(tmp_path / "pids"), how]
    process = EngineProcess("engine 0", launching(command), free_port(), tmp_path / "engine_0.log")
    return process, pids_of(tmp_path / "pids")


def test_close_ends_a_tree_that_ignores_sigterm(tmp_path: Path) -> None:
    process, pids = start(tmp_path, "stay")
    assert all(running(pid) for pid in pids)
    process.close()
    assert [pid for pid in pids if running(pid)] == []
    assert process.exit_code() == 128 + signal.SIGKILL
    process.close()  # a second call has no effect


def test_a_crashed_engine_leaves_no_children_and_its_exit_code(tmp_path: Path) -> None:
    process, pids = start(tmp_path, "crash")
    assert wait_until(lambda: process.exit_code() is not None, 60)
    assert process.exit_code() == 7
    assert [pid for pid in pids if running(pid)] == []
    assert "exit code 7" in process.exit_report()
    assert "engine is up" in process.exit_report()


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_tree_dies_with_the_trainer(tmp_path: Path, signum: signal.Signals) -> None:
    trainer = (
        "import os, sys, time; from pathlib import Path; from mrl.inference.process import EngineProcess, Launch\n"
        f"command = {[sys.executable, '-S', '-c', STUBBORN, str(tmp_path / 'pids'), 'stay']!r}\n"
        "launch = Launch(command, dict(os.environ))\n"
        f"p = EngineProcess('engine 0', lambda folder: launch, 1, Path({str(tmp_path / 'log')!r}))\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", trainer], cwd=Path(__file__).parents[3])
    try:
        pids = pids_of(tmp_path / "pids")
        parent.send_signal(signum)
        parent.wait(60)
        assert wait_until(lambda: not any(running(pid) for pid in pids), 60)
    finally:
        parent.kill()


def test_an_engine_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "print('no such model'); raise SystemExit(3)"]
    process = EngineProcess("engine 0", launching(command), free_port(), tmp_path / "engine_0.log")
    with pytest.raises(EngineStartError, match=r"(?s)exit code 3.*no such model"):
        process.wait_ready(30)


def test_an_engine_that_never_answers_is_ended_at_the_time_out(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    process = EngineProcess("engine 0", launching(command), free_port(), tmp_path / "engine_0.log")
    with pytest.raises(EngineStartError, match=r"(?s)startup_timeout_s = 2 s.*loading"):
        process.wait_ready(2)
    assert process.exit_code() is not None
