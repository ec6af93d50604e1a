"""The command line, and the launcher with small programs instead of training."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl import cli, platform
from mrl.resilience import EXIT_PREEMPTED
from mrl.terminal import TidyLog
from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.train_tools import write_config

ROOT = Path(__file__).parents[3]
LAUNCH = """
import sys
from pathlib import Path
from mrl.launcher import LaunchError, launch
try:
    command = [sys.executable, sys.argv[1]]
    code = launch(command, int(sys.argv[2]), Path("logs"), grace_s=float(sys.argv[3]), settle_s=0.3)
except LaunchError as error:
    sys.exit(f"refused: {error}")
sys.exit(code)
"""
PREAMBLE = """
import json, os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def ready():
    pathlib.Path(f"ready_{rank}").write_text(str(os.getpid()))
"""
LIMIT_S = 30.0


def _hear_hangups() -> None:
    """Restores SIGHUP, which is ignored if the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Launched:
    """A launcher in its own process that runs `program` as every rank."""

    def __init__(self, folder: Path, program: str, nproc: int, grace_s: float = 20.0) -> None:
        self.folder = folder
        (folder / "rank.py").write_text(PREAMBLE + program)
        command = [sys.executable, "-c", LAUNCH, "rank.py", str(nproc), str(grace_s)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for name in ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS"):
            environment.pop(name, None)
        out, err = (folder / "out").open("wb"), (folder / "err").open("wb")
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=err, preexec_fn=_hear_hangups
        )

    def wait(self) -> int:
        return self.process.wait(LIMIT_S)

    def out(self) -> str:
        return (self.folder / "out").read_text()

    def err(self) -> str:
        return (self.folder / "err").read_text()

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank_{rank}.log").read_text()

    def pids(self, *names: str) -> list[int]:
        """Waits until the ranks have written their ready files; returns the pids in them."""
        end = time.monotonic() + LIMIT_S
        files = [self.folder / name for name in names]
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < end, f"{names} not there; {self.err()}"
            time.sleep(0.02)
        return [int(file.read_text()) for file in files]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Launched]]:
    started: list[Launched] = []

    class Here(Launched):
        def __init__(self, program: str, nproc: int, grace_s: float = 20.0) -> None:
            super().__init__(tmp_path, program, nproc, grace_s)
            started.append(self)

    yield Here
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.wait()


def gone(pid: int) -> bool:
    """Returns True if the process ends within the limit; an unreaped zombie counts as ended."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_every_rank_gets_its_place_and_its_log(start: type[Launched]) -> None:
    launched = start(
        """
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MRL_MEETING OMP_NUM_THREADS CUDA_DEVICE_MAX_CONNECTIONS".split()
mode = os.stat(os.environ["MRL_MEETING"]).st_mode & 0o777
print(json.dumps({"mode": oct(mode), **{name: os.environ[name] for name in names}}))
print("a warning of", rank, file=sys.stderr)
""",
        3,
    )
    assert launched.wait() == 0
    places = [json.loads(launched.log(rank).splitlines()[1]) for rank in range(3)]
    assert [place["RANK"] for place in places] == [place["LOCAL_RANK"] for place in places] == ["0", "1", "2"]
    assert {place["WORLD_SIZE"] for place in places} == {place["LOCAL_WORLD_SIZE"] for place in places} == {"3"}
    (meeting,) = {place["MRL_MEETING"] for place in places}
    assert {place["mode"] for place in places} == {"0o700"} and not Path(meeting).exists()
    assert {place["OMP_NUM_THREADS"] for place in places} == {"1"}
    assert {place["CUDA_DEVICE_MAX_CONNECTIONS"] for place in places} == {"1"}, "before a driver can read it"
    assert "a warning of 2" in launched.log(2)
    assert json.loads(launched.out().splitlines()[0])["RANK"] == "0"
    assert "a warning of 0" in launched.out() and "a warning of 1" not in launched.out()


def test_a_failing_rank_ends_the_others_and_is_shown(start: type[Launched]) -> None:
    launched = start(
        """
ready()
if rank == 1:
    while not pathlib.Path("ready_0").exists() or not pathlib.Path("ready_2").exists():
        time.sleep(0.01)
    raise ValueError("the loss is not a number")
time.sleep(600)
""",
        3,
    )
    pids = launched.pids("ready_0", "ready_2")
    assert launched.wait() == 1
    assert "rank 1 failed first (exit code 1)" in launched.err()
    assert "ValueError: the loss is not a number" in launched.err()
    assert "rank 0 ended too (killed by SIGINT)" in launched.err()
    assert all(gone(pid) for pid in pids)


def test_a_rank_that_ignores_sigint_is_killed_with_its_children(start: type[Launched]) -> None:
    launched = start(
        """
if rank == 0:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("child").write_text(str(child.pid))
    ready()
    time.sleep(600)
while not pathlib.Path("ready_0").exists():
    time.sleep(0.01)
sys.exit(7)
""",
        2,
        grace_s=0.5,
    )
    pids = launched.pids("ready_0", "child")
    assert launched.wait() == 7
    assert all(gone(pid) for pid in pids)


def test_what_a_finished_rank_leaves_running_is_ended(start: type[Launched]) -> None:
    launched = start(
        """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path("child").write_text(str(child.pid))
""",
        1,
    )
    assert launched.wait() == 0
    assert gone(*launched.pids("child"))


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGINT,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_lets_the_ranks_close_and_ends_everything(start: type[Launched], number: signal.Signals) -> None:
    launched = start(
        """
def close(*_):
    print("closing", rank, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, close)
ready()
while True:
    time.sleep(0.05)
""",
        2,
    )
    pids = launched.pids("ready_0", "ready_1")
    launched.process.send_signal(number)
    assert launched.wait() == 128 + number
    assert "closing 0" in launched.out() and "closing 1" in launched.log(1)
    assert f"stopped by {number.name}" in launched.err()
    assert all(gone(pid) for pid in pids)


def test_ranks_that_do_not_hear_ctrl_c_end_soon_after_rank_0(start: type[Launched]) -> None:
    launched = start(
        "signal.signal(signal.SIGINT, signal.SIG_IGN if rank else signal.SIG_DFL)\nready()\ntime.sleep(600)\n", 2, 600
    )
    pids = launched.pids("ready_0", "ready_1")
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait() == 130
    assert all(gone(pid) for pid in pids)


def test_a_second_ctrl_c_does_not_wait(start: type[Launched]) -> None:
    launched = start("signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(600)\n", 2, grace_s=600)
    pids = launched.pids("ready_0", "ready_1")
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert launched.process.poll() is None
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait() == 130
    assert all(gone(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_ranks_die_with_a_launcher_that_is_killed(start: type[Launched]) -> None:
    launched = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(600)\n", 2)
    pids = launched.pids("ready_0", "ready_1")
    launched.process.kill()
    assert all(gone(pid) for pid in pids)


def test_a_killed_rank_names_the_signal(start: type[Launched]) -> None:
    launched = start("os.kill(os.getpid(), signal.SIGKILL)\n", 1)
    assert launched.wait() == 137
    assert "rank 0 failed first (killed by SIGKILL, often by the kernel when memory runs out)" in launched.err()


def test_two_launchers_do_not_share_a_run_directory(start: type[Launched]) -> None:
    first = start("ready()\ntime.sleep(600)\n", 1)
    first.pids("ready_0")
    second = start("", 1)
    assert second.wait() == 1
    owner = f"process {first.process.pid} on {socket.gethostname()}"
    assert f"refused: logs is in use by another run ({owner}): stop it, or choose another" in second.err()


def test_a_terminal_stays_a_terminal_for_rank_0(tmp_path: Path) -> None:
    """Rank 0's output is a terminal, which a live display needs. The log keeps the final text."""
    (tmp_path / "rank.py").write_text(
        """
import sys
assert sys.stdout.isatty()
sys.stdout.write("step 1\\nreward 0.1")
sys.stdout.write("\\r\\x1b[2K\\x1b[1A\\x1b[2Kstep 2\\nreward 0.2\\n")
sys.stdout.write("\\x1b[1mdone\\x1b[0m\\n")
"""
    )
    master, slave = pty.openpty()
    command = [sys.executable, "-c", LAUNCH, "rank.py", "1", "5"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=slave)
    os.close(slave)
    assert process.wait(LIMIT_S) == 0
    shown = os.read(master, 4096)
    os.close(master)
    assert b"reward 0.1" in shown and b"\x1b[1A" in shown
    assert (tmp_path / "logs/rank_0.log").read_text().splitlines()[1:] == ["step 2", "reward 0.2", "done"]


def test_a_tidy_log_is_the_same_however_the_output_is_cut(tmp_path: Path) -> None:
    text = b"".join(
        b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * (2 if n else 0) + b"\x1b[32mstep\x1b[0m %d\nreward\nkl" % n for n in range(9)
    )
    expected = "kept\nstep 8\nreward\nkl\n"
    for size in (1, 3, 7, len(text)):
        path = tmp_path / f"log_{size}"
        path.write_text("kept\n")
        log = TidyLog(path.open("ab"))
        source = io.BytesIO(text)
        while piece := source.read(size):
            log.write(piece)
        log.close()
        assert path.read_text() == expected


def mrl(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return zygote.run("mrl", *args, cwd=cwd, **environment)


def test_help_lists_the_commands(tmp_path: Path) -> None:
    done = mrl("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("train", "report", "doctor"))


def test_help_and_configurations_are_read_without_torch() -> None:
    code = "import sys, mrl.cli, mrl.launcher, mrl.config.loader; print([m for m in sys.argv[1:] if m in sys.modules])"
    command = [sys.executable, "-c", code, "torch", "megatron", "transformers"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_train_refuses_a_bad_configuration_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("trainer: sft\nrun: {name: x}\nmodel: {path: nowhere}\ndata: {train: none}\n")
    done = mrl("train", "bad.yaml", "run.sed=3", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 problems in bad.yaml" in done.stderr
    assert "override run.sed=3: run.sed: unknown key; did you mean seed?" in done.stderr
    assert "bad.yaml:1: batch: required key is missing" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_who_is_told_to_stop_before_anything_has_begun_is_to_be_started_again(
    tmp_path: Path, tiny_models: TinyModels, number: signal.Signals
) -> None:
    """A signal before the run begins means "start it again". The signal comes during the imports, which never end with
    this fake torch."""
    torch = tmp_path / "slow" / "torch" / "__init__.py"
    torch.parent.mkdir(parents=True)
    torch.write_text(f"import os, time\nopen({str(tmp_path)!r} + f'/{{os.getpid()}}.pid', 'w')\ntime.sleep(600)\n")
    config = write_config(tmp_path, tiny_models("qwen2", weights=False))
    process = subprocess.Popen(
        [sys.executable, "-m", "mrl", "train", str(config), "model.from_scratch=true"],
        env={**os.environ, "PYTHONPATH": f"{torch.parents[1]}:{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + LIMIT_S
    while not (tmp_path / f"{process.pid}.pid").exists():
        assert process.poll() is None and time.monotonic() < end, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == EXIT_PREEMPTED, said
    assert said == (
        f"mrl: stopped by {number.name} before the run started (exit code 75): run the same command to start it\n"
    )


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({}, "make this process a rank, but MASTER_ADDR and MASTER_PORT are not set: unset both"),
        ({"MASTER_ADDR": "127.0.0.1"}, "but MASTER_PORT is not set"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT=x in the environment is not a port"),
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2 in the environment do not describe a rank"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two in the environment do not describe a rank"),
    ],
)
def test_a_rank_without_a_world_is_told_so(
    place: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ({"RANK": "0", "WORLD_SIZE": "2"} | place).items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "none.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and says in said
    with pytest.raises(platform.WorldError, match=re.escape(says)):
        platform.init_process_group(5.0)


def test_an_outer_world_s_number_silences_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A LOCAL_RANK of an outer world alone does not make this process a rank, so errors are printed."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli.main(["train", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_what_torch_compiles_lies_in_no_folder_of_everybody_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert cli.main(["train", str(tmp_path / "none.yaml")]) == 2
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(Path.home())


def test_report_names_a_missing_directory(tmp_path: Path) -> None:
    done = mrl("report", "runs/none", cwd=tmp_path)
    assert done.returncode == 1
    assert "runs/none is not a directory" in done.stderr


def test_doctor_prints_its_table(tmp_path: Path) -> None:
    done = mrl("doctor", cwd=tmp_path, COLUMNS="160")
    assert done.returncode == 0, done.stderr
    assert "megatron" in done.stdout.lower() and "transformer" in done.stdout.lower()
    assert re.search(r"bubblewrap +(absent|\d)", done.stdout)


def test_doctor_survives_a_sandbox_that_does_not_work(tmp_path: Path) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho no namespaces >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    done = mrl("doctor", cwd=tmp_path, COLUMNS="400", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert re.search(r"bubblewrap +unknown, unusable \(cannot sandbox untrusted programs: no namespaces", done.stdout)


NOTED = """
sys.path.insert(0, os.environ["PYTHONPATH"])
from mrl import failure
class EngineDied(RuntimeError):
    __module__ = "mrl.made_up"
def fail(error):
    try:
        raise error
    except Exception as caught:
        failure.note(caught)
    sys.exit(1)
"""


def test_of_errors_on_all_ranks_the_cause_is_shown_alone(start: type[Launched]) -> None:
    """Only the cause is shown: rank 2 fails, and rank 1, which lost contact with it, reports that earlier."""
    launched = start(
        NOTED
        + """
ready()
while not pathlib.Path(f"ready_{1 if rank == 2 else 2}").exists():
    time.sleep(0.01)
if rank == 2:
    fail(EngineDied("the engine died of thirst"))
fail(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
""",
        3,
    )
    assert launched.wait() == 1
    assert launched.err() == "mrl: error: the engine died of thirst\nmrl: details: logs/rank_2.log\n"
    assert "Traceback" in launched.log(2) and "thirst" in launched.log(2)
    assert all("Connection closed by peer" in launched.log(rank) for rank in (0, 1))
    assert "Traceback" not in launched.out()


def test_who_loses_contact_with_a_killed_rank_is_not_the_cause(start: type[Launched]) -> None:
    launched = start(
        NOTED
        + """
signal.signal(signal.SIGINT, signal.SIG_IGN)
ready()
if rank == 1:
    while not pathlib.Path("ready_0").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
fail(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
""",
        2,
    )
    assert launched.wait() == 137
    assert "error: rank 1 failed first (killed by SIGKILL" in launched.err()
    assert "Connection closed" not in launched.err() and "Connection closed" in launched.log(0)


def test_who_waits_in_vain_for_a_stopped_rank_is_not_the_cause(start: type[Launched]) -> None:
    """A rank stopped by SIGSTOP is named as the cause, and receives the interrupt."""
    launched = start(
        NOTED
        + """
if rank == 1:
    ready()
    try:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    except KeyboardInterrupt:
        print("closing", flush=True)
        sys.exit(1)
while not pathlib.Path("ready_1").exists():
    time.sleep(0.01)
time.sleep(0.5)
fail(RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv operation to complete"))
""",
        2,
    )
    assert launched.wait() == 1
    assert "error: rank 1 had been paused (SIGSTOP or a debugger), and the other ranks timed out" in launched.err()
    assert "Timed out" not in launched.err() and "Timed out" in launched.log(0)
    assert "closing" in launched.log(1)


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("arguments", [["config"], pytest.param(["config", "run.name"], marks=pytest.mark.slow)])
def test_a_reader_that_has_seen_enough_is_no_failure(arguments: list[str], unbuffered: str) -> None:
    """A closed pipe, as with `mrl config | head`, ends the command quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    command, env = [sys.executable, "-m", "mrl", *arguments], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_pipe_of_the_command_s_own_that_breaks_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.commands.manual.run", lambda _: os.write(writer, b"x"))
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        cli.main(["config"])
    os.close(writer)
