"""Ranks forked from one process: what a fork inherits, what the forks share, and when there is no fork server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system.commands.test_cli import gone

ROOT = Path(__file__).parents[3]
# Prints the answers of the program "rank", which the fork server starts, or "none"
STARTS = """
import json, os, signal, sys, threading, time
from mrl.launcher import RankForkServer
if "thread" in os.environ:
    threading.Thread(target=time.sleep, args=[600], daemon=True).start()
number, module, *more = sys.argv[1:]
with RankForkServer(module) as fork_server:
    command = [sys.executable, *more, "-m", "rank", "one", "two words"]
    children = []
    for rank in range(int(number)):
        env = {**os.environ, "RANK": str(rank), "GREETING": "h\\udcffi"}
        with open("out", "ab") as out, open(os.devnull) as nothing:
            children.append(fork_server.start(command, env, (nothing.fileno(), out.fileno(), out.fileno())))
if None in children:
    sys.exit("none")
print(os.getpid(), *[child.pid for child in children], flush=True)
if "kill" in os.environ:
    children[0].poll() is None and os.kill(children[0].pid, signal.SIGKILL)
print([child.wait(60) for child in children], [child.poll() for child in children])
"""
RANK = """
import gc, heavy, json, os, signal, sys, time
sys.stdout.write(json.dumps({"argv": sys.argv[1:], "rank": os.environ["RANK"], "greeting": os.environ["GREETING"],
    "set": os.environ["SET"],
    "imported by": heavy.pid,
    "collected": [heavy.collected, gc.isenabled()], "frozen": gc.get_freeze_count(),
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
    "stdin": sys.stdin.read(), "name": __name__, "interrupt": signal.getsignal(signal.SIGINT).__name__}) + "\\n")
if "stay" in os.environ:
    print("ready"); time.sleep(600)
sys.exit(3 + int(os.environ["RANK"]))
"""
HEAVY = """
import gc, os
collected = gc.isenabled()
pid = os.getpid()
os.environ['SET'] = 'by an import'
print('heavy has been imported')
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"rank": RANK, "heavy": HEAVY, "starts": STARTS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "starts.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "out").read_text().splitlines()
    return sorted((json.loads(line) for line in lines if line.startswith("{")), key=lambda answer: answer["rank"])


@pytest.mark.parametrize("more", [[], ["-u"]])
def test_a_copy_is_the_program_in_its_place(folder: Path, more: list[str]) -> None:
    out, err = start(folder, "2", "heavy", *more).communicate(timeout=60)
    pids, codes = out.splitlines()
    launcher, *ranks = map(int, pids.split())
    assert codes == "[3, 4] [3, 4]", err
    found = answers(folder)
    assert [answer["pid"] for answer in found] == [answer["session"] for answer in found] == ranks
    assert {answer["parent"] for answer in found} == {launcher}
    (imported_by,) = {answer["imported by"] for answer in found}  # imported once, and in another process than the ranks
    assert imported_by not in (launcher, *ranks)
    for rank, answer in enumerate(found):
        assert answer["argv"] == ["one", "two words"] and answer["name"] == "__main__" and answer["stdin"] == ""
        assert (answer["rank"], answer["greeting"]) == (str(rank), "h\udcffi")
        assert answer["set"] == "by an import"
        assert answer["interrupt"] == "default_int_handler"
        assert answer["collected"] == [False, True] and answer["frozen"] > 1000  # off during the imports
    assert (folder / "out").read_text().count("heavy has been imported") == 1  # rank 0 prints it, for all
    assert "imported" not in out + err


def test_a_killed_copy_names_the_signal(folder: Path) -> None:
    out, err = start(folder, "1", "heavy", stay="1", kill="1").communicate(timeout=60)
    assert out.splitlines()[1] == f"[{-signal.SIGKILL}] [{-signal.SIGKILL}]", err


def test_copies_die_with_their_launcher(folder: Path) -> None:
    launcher = start(folder, "2", "heavy", stay="1")
    assert launcher.stdout is not None
    _, *ranks = map(int, launcher.stdout.readline().split())
    end = time.monotonic() + 60
    while (folder / "out").read_text().count("ready") < 2:
        assert time.monotonic() < end
        time.sleep(0.02)
    launcher.kill()
    launcher.communicate(timeout=30)
    assert all(gone(pid) for pid in ranks)


@pytest.mark.parametrize(
    "heavy",
    [
        "import nowhere",
        "raise SystemExit",
        "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()",
    ],
)
def test_what_cannot_be_copied_is_left_to_programs(folder: Path, heavy: str) -> None:
    (folder / "heavy.py").write_text(heavy)
    out, err = start(folder, "2", "heavy").communicate(timeout=60)
    assert (out, err) == ("", "none\n")


def test_a_process_with_threads_is_not_copied(folder: Path) -> None:
    """A process with threads is not forked. Forks would lack the threads, and could wait for locks that they hold."""
    out, err = start(folder, "1", "heavy", thread="1").communicate(timeout=60)
    assert (out, err) == ("", "none\n")


def test_only_this_python_s_modules_are_imitated(folder: Path) -> None:
    out, err = start(folder, "1", "heavy", "-O").communicate(timeout=60)
    assert (out, err) == ("", "none\n")


STOPPED = """
import os, signal, sys, time
import psutil
from mrl import forks
from mrl.launcher import RankForkServer
forks.TIMEOUT_S = 2.0
with RankForkServer("json") as made:
    command = [sys.executable, "-m", "json.tool", "--help"]
    assert made.start(command, dict(os.environ), (0, 1, 2)).wait(60) == 0
    os.kill(made._pid, signal.SIGSTOP)
    server, made.close = made._pid, lambda: None
    print(made.start(command, dict(os.environ), (0, 2, 2)), flush=True)
    os.kill(server, signal.SIGCONT)
    time.sleep(1)
    print([each.pid == server for each in psutil.Process().children(recursive=True)])
    del made.close
"""


def test_a_copy_that_comes_too_late_is_no_second_rank() -> None:
    """A fork that arrives too late is no second rank: a program was started instead."""
    done = subprocess.run([sys.executable, "-c", STOPPED], cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert done.stdout.splitlines()[-2:] == ["None", "[True]"] and done.stderr == ""
