"""Ranks that start, wait for each other and stop, in small worlds under each launcher."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch

from mrl import gloo_loop, platform
from mrl.launcher import signals
from mrl.platform.gloo import _wait_for_all
from mrl.platform.process import _meet
from mrl.ports import GLOO, free_port
from mrl.resilience.protocol import EXIT_PREEMPTED, MARKER
from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.train_tools import Train, write_config
from tests.system.launcher.test_trainer_faults import fake_engine

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 8.0


def start(folder: Path, launcher: str, *arguments: str) -> subprocess.Popen[str]:
    return zygote.start(
        [sys.executable, "-m", "tests.worlds.launched", launcher, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def listeners(folder: Path) -> list[str]:
    """Returns the addresses on which rank 0 listens. Its parent must listen on none: neither mrl's launcher nor
    torchrun's or ft_launcher's agent."""
    of_rank, of_parent = json.loads((folder / "listening").read_text())
    assert of_parent == []
    return [address.partition(":")[0] for address in of_rank]


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def of_interfaces() -> dict[str, set[str]]:
    """Returns the IPv4 addresses of each interface that is up and has any: lo, and on most machines another one."""
    up = psutil.net_if_stats()
    found = {
        name: {address.address for address in every if address.family == socket.AF_INET}
        for name, every in psutil.net_if_addrs().items()
        if up[name].isup
    }
    return {name: addresses for name, addresses in found.items() if addresses}


@pytest.mark.parametrize("every", [False, True])
def test_gloo_listens_on_the_interfaces_that_the_environment_names(
    every: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo uses the interfaces of the environment variable, whatever the host name resolves to."""

    def listening() -> set[tuple[str, int]]:
        own = psutil.Process().net_connections("tcp4")
        return {tuple(one.laddr) for one in own if one.status == psutil.CONN_LISTEN}

    monkeypatch.setattr(gloo_loop, "_devices", {})
    known = of_interfaces()
    for names in [[*known]] if every else [[name] for name in known]:
        monkeypatch.setenv(GLOO, ",".join(names))
        before = listening()
        assert gloo_loop.devices(torch.distributed.ProcessGroupGloo) is gloo_loop.devices(None)
        made = [address for address, _ in listening() - before]
        assert len(made) == len(names) and all(known[name] & {*made} for name in names)


def test_a_fork_of_a_rank_shares_a_gloo_thread_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is forked from a process with the ranks' imports calls it a second time."""
    c10d = torch.distributed.distributed_c10d
    monkeypatch.setattr(c10d, "ProcessGroupGloo", c10d.ProcessGroupGloo)
    called = list[int]()
    gloo_loop.share(lambda store, rank, size, timeout: called.append(1))
    gloo_loop.share(lambda store, rank, size, timeout: called.append(2))
    group = c10d.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1, timedelta(seconds=10))
    group.allreduce([torch.ones(2)]).wait()
    assert called == [2]


def test_a_stopped_rank_is_noticed_and_named(tmp_path: Path) -> None:
    """A stopped rank is noticed and named after the time-out, though rank 0 may work for longer than run.timeout_s
    while the others wait. Two worlds run at once, one for each stopped rank."""
    folders = [tmp_path / "0", tmp_path / "1"]
    with contextlib.ExitStack() as stack:
        runs = []
        for folder in folders:
            folder.mkdir()
            runs.append(stack.enter_context(start(folder, "mrl", "tests.worlds.pulse", str(TIMEOUT_S), "45")))
            stack.callback(runs[-1].kill)
        end = time.monotonic() + 60
        while not all((folder / f"pid_{rank}").exists() for rank in range(2) for folder in folders):
            ended = [run.communicate()[0] for run in runs if run.poll() is not None]
            assert time.monotonic() < end and not ended, ended
            time.sleep(0.1)
        time.sleep(1.5 * TIMEOUT_S)
        for victim, (folder, run) in enumerate(zip(folders, runs, strict=True)):
            assert run.poll() is None, run.communicate()[0]
            os.kill(int((folder / f"pid_{victim}").read_text()), signal.SIGSTOP)
        for victim, (folder, run) in enumerate(zip(folders, runs, strict=True)):
            said = run.communicate(timeout=120)[0]
            assert run.returncode == 1, said
            assert said.count("mrl: error:") == 1 and "Traceback" not in said, said
            assert re.search(rf"mrl: error: .*rank {victim} ", said) and f"rank {1 - victim} " not in said, said
            assert listeners(folder) and set(listeners(folder)) <= LOOPBACK


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchrun", "ft"])
def test_nothing_listens_to_other_machines(kind: str, tmp_path: Path) -> None:
    """Ranks under torchrun and ft_launcher listen on loopback only. (The test above covers mrl's own launcher.)"""
    with start(tmp_path, kind, "tests.worlds.pulse", "20", "0") as run:
        said = run.communicate(timeout=60)[0]
    assert run.returncode == 0 and "the result" in said, said
    assert listeners(tmp_path) and set(listeners(tmp_path)) <= LOOPBACK


@pytest.fixture
def a_place(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes this process a rank of a world of three, whatever world another test left it in."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name, value in {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_world_that_did_not_form_names_who_is_missing(a_place: pytest.MonkeyPatch) -> None:
    a_place.setenv("RANK", "0")
    with pytest.raises(
        platform.WorldError, match=r"not all 3 ranks joined within .* = 0.5 s: rank 1, rank 2 did not join"
    ):
        platform.init_process_group(0.5)
    a_place.setenv("RANK", "2")
    a_place.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(
        platform.WorldError, match=r"rank 0 \(127.0.0.1:\d+\) did not respond within run.timeout_s = 1 s"
    ):
        platform.init_process_group(1)


def test_the_ranks_of_mrl_train_meet_where_nobody_else_can_come(a_place: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ranks of `mrl train` rendezvous in files. A listening store would accept pickled data, such as group
    addresses, from any account of the machine."""
    for name, value in {"MRL_MEETING": str(tmp_path), "RANK": "0", "WORLD_SIZE": "1"}.items():
        a_place.setenv(name, value)
    before = psutil.Process().net_connections()
    store = _meet(0, 1, timedelta(seconds=1))
    store.set("key", "value")
    assert psutil.Process().net_connections() == before
    a_place.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # a restart's ranks must not see the former attempt's files
    with pytest.raises(platform.WorldError, match="not all 2 ranks joined within run.timeout_s = 0.2 s: rank 0 did"):
        _meet(1, 2, timedelta(seconds=0.2))


def test_an_address_of_another_machine_is_named(a_place: pytest.MonkeyPatch) -> None:
    a_place.setenv("RANK", "0")
    a_place.setenv("MASTER_ADDR", "192.0.2.1")
    with pytest.raises(platform.WorldError, match=r"rank 0 cannot listen on MASTER_ADDR 192.0.2.1, port \d+: Cann"):
        platform.init_process_group(1)


def test_ctrl_c_that_an_import_swallows_is_not_lost() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        signals.record_interrupts()
        signals.raise_recorded_interrupt()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signals.raise_recorded_interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_rank_that_makes_a_group_hears_ctrl_c() -> None:
    """A rank that creates a process group reacts to Ctrl-C instead of waiting for the others."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            _wait_for_all(torch.distributed.HashStore(), 0, 2, timedelta(seconds=60))
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(platform.WorldError, match="a gloo group of 2 ranks did not form within 0.1 s: member 1 did"):
        _wait_for_all(torch.distributed.HashStore(), 0, 2, timedelta(seconds=0.1))


def have_loaded(library: str, run: Train) -> int:
    """Returns how many of the run's processes have loaded the library."""
    found = 0
    for pid in run.processes():
        with contextlib.suppress(OSError):  # the process has just ended
            found += library in Path(f"/proc/{pid}/maps").read_text()
    return found


@pytest.mark.parametrize(("library", "processes"), [("pydantic_core", 1), ("libtorch_cpu", 1), ("libtorch_cpu", 3)])
def test_ctrl_c_while_it_starts(library: str, processes: int, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Ctrl-C ends the run in every part of its start: reading the configuration, counting GPUs, importing for the
    ranks, and with running ranks."""
    config = write_config(tmp_path, tiny_models("llama"), actor={"parallel": {"tensor": 2}})
    with (
        fake_engine(tmp_path, "generate_hangs") as url,
        Train(tmp_path, config, f"rollout.urls=['{url}']", copied=False) as run,
    ):
        end = time.monotonic() + 60
        while have_loaded(library, run) < processes:
            assert time.monotonic() < end, run.terminal
            time.sleep(0.02)
        run.signal(signal.SIGINT)
        assert run.wait(30) in (128 + signal.SIGINT, -signal.SIGINT), run.terminal
        assert run.left_running() == {}
    assert "Traceback" not in run.terminal and run.terminal.count("mrl: stopped by") <= 1, run.terminal
    assert len([line for line in run.terminal.splitlines() if "stopped" not in line and "  " not in line]) <= 1


LATE = """
import signal, sys, time
from pathlib import Path
from mrl.resilience import preemption
preemption.save_on_signal(0.05)
if len(sys.argv) > 1:
    preemption.begin(Path(sys.argv[1]))
signal.raise_signal(signal.SIGTERM)
time.sleep(60)
"""
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("where", "environment", "code"),
    [
        ("run", {}, EXIT_PREEMPTED),
        ("run", TORCHRUN, 0),  # torchrun treats other codes as failures; the marker file reports the preemption
        ("gone", TORCHRUN, EXIT_PREEMPTED),  # only the exit code can tell the launcher
        (None, TORCHRUN, EXIT_PREEMPTED),
        (None, TORCHRUN | {"RANK": "1"}, EXIT_PREEMPTED),
        (None, {}, EXIT_PREEMPTED),
    ],
)
@pytest.mark.parametrize("stdout", [os.devnull, "/dev/full"])
def test_a_rank_that_misses_the_deadline_tells_its_launcher(
    tmp_path: Path, where: str | None, environment: dict[str, str], code: int, stdout: str
) -> None:
    """A rank that misses the deadline reports it by exit code or marker, also before there is a run directory, and with
    a full disk for its log or marker."""
    (tmp_path / "run").mkdir()
    run_dir = [] if where is None else [str(tmp_path / where)]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **environment}
    with open(stdout, "w") as log:
        done = subprocess.run([sys.executable, "-c", LATE, *run_dir], env=env, stdout=log, timeout=60)
    assert done.returncode == code
    assert [file.name for file in (tmp_path / "run").iterdir()] == [MARKER] * (where == "run")
