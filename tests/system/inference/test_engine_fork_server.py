"""Engines forked from a process with all imports: what a fork inherits, who owns it, and when none is possible."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mrl.inference import fork_server
from tests.helpers.train_tools import Train, write_config
from tests.system.inference.test_rollout_supervisor import pids_of, running, wait_until

ROOT = Path(__file__).parents[3]
OWNER = """
import json, os, sys
from pathlib import Path
from mrl.inference.launch import Launch
from mrl.inference.fork_server import EngineForkServer, VARIABLE
from mrl.inference.process import EngineProcess
with EngineForkServer("stub", sys.argv[1]) as fork_server:
    launch = Launch([sys.executable, "-m", "stub", *sys.argv[3:]], {**os.environ, **json.loads(sys.argv[2])}, "stub")
    process = EngineProcess("engine 0", lambda folder: launch, 1, Path("engine.log"))
    print(json.dumps([os.getpid(), vars(fork_server).get("_pid"), process.pid, os.environ.get(VARIABLE)]), flush=True)
    for line in sys.stdin:
        getattr(process, line.strip())()
        print(json.dumps(process.exit_code()), flush=True)
"""
# An engine that ignores SIGTERM, with a child that has left its session; it ends once the file "end" exists
STUB = """
import ctypes, heavy, json, os, pathlib, signal, subprocess, sys, tempfile, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-c", sleep], start_new_session=True)
print(json.dumps({"imported by": heavy.pid, "pid": os.getpid(), "leads": os.getsid(0) == os.getpid(),
    "argv": sys.argv[1:], "secret": os.environ.get("MRL_ENGINE_KEY"), "stdin": sys.stdin.read(),
    "temporary": tempfile.gettempdir(), "interrupt": signal.getsignal(signal.SIGINT).__name__}), flush=True)
pathlib.Path("pids.tmp").write_text(f"{os.getpid()} {child.pid}")
os.rename("pids.tmp", "pids")
while not os.path.exists("end"):
    time.sleep(0.02)
if "fails" in sys.argv[1:]:
    raise ValueError("no such weights")
sys.exit(7)
"""
HEAVY = "import os, tempfile; pid = os.getpid(); tempfile.gettempdir(); os.environ['HF_SET'] = 'by an import'"
THREADS = "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl and pidfd are Linux's")


class Owner:
    """A program with a fork server and an engine, with the files of both in `folder`."""

    def __init__(
        self, folder: Path, imports: str = "heavy", *arguments: str, temporary: str = "/tmp", **environment: str
    ) -> None:
        more = {"broken": "raise ImportError", "threads": THREADS}
        for name, text in {"owner": OWNER, "stub": STUB, "heavy": HEAVY, **more}.items():
            (folder / f"{name}.py").write_text(text)
        here = {name: value for name, value in os.environ.items() if name != fork_server.VARIABLE}
        own = json.dumps({"HF_SET": "by an import", **environment})
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "owner.py", imports, own, *arguments],
            cwd=folder,
            env={**here, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}", "TMPDIR": temporary},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid, self.fork_server, self.supervisor, place = json.loads(self._line())
        self.place = Path(place or "/")

    def ask(self, method: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{method}\n")
        self.process.stdin.flush()
        return json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    @property
    def pids(self) -> list[int]:
        return pids_of(self.folder / "pids")

    @property
    def says(self) -> dict[str, Any]:
        assert self.pids
        return json.loads((self.folder / "engine.log").read_text().splitlines()[0])


@pytest.fixture
def own(tmp_path: Path) -> Any:
    made = list[Owner]()

    def make(*arguments: str, **environment: str) -> Owner:
        made.append(Owner(tmp_path, *arguments, **environment))
        return made[-1]

    yield make
    for owner in made:
        owner.process.kill()
        owner.process.communicate()


def test_an_engine_is_a_copy_with_an_environment_and_files_of_its_own(own: Callable[..., Owner]) -> None:
    owner = own(MRL_ENGINE_KEY="secret")
    says = owner.says
    assert says["imported by"] == owner.fork_server != says["pid"] == owner.pids[0]
    assert says["leads"] and says["secret"] == "secret" and says["stdin"] == ""
    assert says["interrupt"] == "default_int_handler"
    assert Path(says["temporary"]).name.startswith("mrl-engine-")
    assert Path(f"/proc/{owner.supervisor}/fd/1").readlink() == owner.folder / "engine.log"
    assert stat.S_IMODE(owner.place.stat().st_mode) == 0o700, "nobody else may order processes"


@pytest.mark.slow
def test_it_ends_with_close_and_comes_again_as_a_copy(own: Callable[..., Owner]) -> None:
    owner = own()
    first = owner.pids
    (owner.folder / "pids").unlink()
    assert owner.ask("restart") is None
    second = owner.pids
    assert not any(map(running, first)) and all(map(running, second))
    assert owner.ask("close") == 128 + signal.SIGKILL
    assert not any(map(running, second))
    lines = (owner.folder / "engine.log").read_text().splitlines()
    assert [json.loads(line)["imported by"] for line in lines] == [owner.fork_server] * 2
    assert not Path(json.loads(lines[1])["temporary"]).exists()


@pytest.mark.slow
def test_its_own_end_is_known_with_its_exit_code(own: Callable[..., Owner]) -> None:
    owner = own()
    pids = owner.pids
    (owner.folder / "end").touch()
    assert wait_until(lambda: owner.ask("exit_code") == 7, 30)
    assert not any(map(running, pids))


@pytest.mark.slow
def test_its_own_error_is_in_its_log_and_in_nobody_else_s_hands(own: Callable[..., Owner]) -> None:
    owner = own("heavy", "fails")
    assert owner.pids
    (owner.folder / "end").touch()
    assert wait_until(lambda: owner.ask("exit_code") == 1, 30)
    log = (owner.folder / "engine.log").read_text()
    assert "ValueError: no such weights" in log and "owner.py" not in log


@pytest.mark.parametrize("victim", ["owner", pytest.param("supervisor", marks=pytest.mark.slow)])
def test_its_whole_tree_dies_with_its_owner_or_its_supervisor(own: Callable[..., Owner], victim: str) -> None:
    owner = own()
    pids = owner.pids
    os.kill(owner.pid if victim == "owner" else owner.supervisor, signal.SIGKILL)
    assert wait_until(lambda: not running(pids[0]), 30)
    if victim == "supervisor":
        assert wait_until(lambda: owner.ask("exit_code") == -signal.SIGKILL, 30)
        os.kill(pids[1], signal.SIGKILL)  # as for a supervisor without a fork server
    else:
        assert wait_until(lambda: not running(pids[1]), 30)
        assert wait_until(lambda: not running(owner.fork_server), 30)


@pytest.mark.slow
def test_it_outlives_its_nursery_and_comes_again_as_a_program(own: Callable[..., Owner]) -> None:
    owner = own()
    pids = owner.pids
    os.kill(owner.fork_server, signal.SIGKILL)
    time.sleep(0.5)
    assert all(map(running, pids)) and owner.ask("exit_code") is None
    (owner.folder / "pids").unlink()
    owner.ask("restart")
    assert owner.pids and not any(map(running, pids))
    last = json.loads((owner.folder / "engine.log").read_text().splitlines()[-1])
    assert last["imported by"] == last["pid"]


@pytest.mark.parametrize(
    "why",
    ["broken", *(pytest.param(why, marks=pytest.mark.slow) for why in ("its environment", "threads", "a long path"))],
)
def test_where_there_can_be_no_copy_it_is_a_program(own: Callable[..., Owner], tmp_path: Path, why: str) -> None:
    (long := tmp_path / ("long" * 30)).mkdir()  # the path is too long for a socket
    if why == "a long path":
        owner = own(temporary=str(long))
    else:
        owner = own(OMP_NUM_THREADS="3") if why == "its environment" else own(why)
    says = owner.says
    assert says["imported by"] == says["pid"] == owner.pids[0]
    owner.ask("close")
    assert not any(map(running, owner.pids))


@pytest.mark.slow
def test_a_run_makes_one_for_its_engine(tmp_path: Path, tiny_models: Any) -> None:
    config = write_config(tmp_path, tiny_models("llama"), rollout={"engine": "transformers"})
    with Train(tmp_path, config, "run.steps=400", copied=False, **{fork_server.VARIABLE: ""}) as run:
        run.wait_for("step 1")
        engine = run.pid_of("transformers_engine.server")
        supervisor = int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])
        assert b"-I" not in Path(f"/proc/{supervisor}/cmdline").read_bytes()
        run.signal(signal.SIGINT)
        assert run.wait(60) == 128 + signal.SIGINT
        assert run.left_running() == {}
