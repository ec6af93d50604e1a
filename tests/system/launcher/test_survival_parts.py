"""Unit tests of the parts that let a run survive faults."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorServer

from mrl import failure
from mrl.config.schema import SectionTimeouts
from mrl.inference import process
from mrl.inference.errors import EngineStartError
from mrl.inference.launch import Launch
from mrl.inference.process import EngineProcess
from mrl.launcher.logs import root_cause
from mrl.resilience import ft_config, sections
from mrl.resilience.stragglers import DEVICE, TIMED, StragglerReport
from mrl.trainers.shared.heartbeat import LostRankError
from mrl.trainers.shared.world import RankZeroError, World, _RankZero

SLEEP = Launch([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ))


def report(update: list[float], device: list[float], peers: list[int] | None = None) -> StragglerReport:
    seconds = {name: [0.0] * len(update) for name in TIMED} | {"update": update, DEVICE: device}
    seconds["rollout"] = [9.0, *[0.1] * (len(update) - 1)]
    return StragglerReport(peers or [0] * len(update), seconds, steps=10, ratio=2.0)


class TestStragglers:
    def test_a_slow_rank_is_named_with_what_it_was_slow_at(self) -> None:
        found = report([1.0, 1.1, 2.5, 1.0], [0.01] * 4)
        assert found.metrics() == {"straggler/slowdown": 2.5, "straggler/slowest_rank": 2.0}
        assert found.note() == "slow rank 2: 2.5 s for update over 10 steps, 2.5 times its peers' median of 1 s"

    def test_a_slow_device_is_named(self) -> None:
        note = report([1.0, 1.0], [0.01, 0.03]).note()
        assert note is not None and note.startswith("slow rank 1: 0.03 s for a fixed test computation")

    def test_below_the_ratio_nobody_is_named(self) -> None:
        assert report([1.0, 1.9], [0.01, 0.01]).note() is None

    def test_work_that_only_rank_0_has_is_not_compared(self) -> None:
        assert report([1.0, 1.0], [0.01, 0.01]).metrics()["straggler/slowdown"] == 1.0

    def test_pipeline_stages_are_not_each_other_s_peers(self) -> None:
        assert report([1.0, 1.0, 3.0, 3.0], [0.01] * 4, peers=[0, 0, 1, 1]).note() is None


class TestSections:
    @pytest.fixture
    def monitor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """Starts a real monitor of this process as rank 0, with the time-outs of the file that the fixture returns."""
        file = ft_config.write(tmp_path, SectionTimeouts(update=77.0))
        cfg = FaultToleranceConfig.from_yaml_file(str(file), ignore_not_recognized=False)
        cfg.enable_nic_monitor = False
        socket = str(tmp_path / "monitor.socket")
        server = RankMonitorServer.run_in_subprocess(cfg, socket, mp_ctx=torch.multiprocessing.get_context("fork"))
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(sections.MONITOR_VARIABLE, socket)
        yield file
        server.terminate()
        server.join(20)

    def test_the_monitor_has_the_configuration_s_time_outs(self, monitor: Path) -> None:
        with sections.watch_rank(SectionTimeouts(update=77.0), monitor.parent) as is_set_up:
            is_set_up()
            with sections.section("rollout"), sections.section("reward"):
                pass
            with pytest.raises(KeyError), sections.section("update"):
                raise KeyError
            with sections.section("update"):  # the failed section must not be open any more
                pass

    def test_another_one_s_are_refused(self, monitor: Path) -> None:
        with pytest.raises(sections.MonitorError, match=f"--ft-cfg-path {monitor}"):
            with sections.watch_rank(SectionTimeouts(update=78.0), monitor.parent):
                pass
        assert "update: 78.0" in monitor.read_text()

    @pytest.mark.parametrize("gone", ["before", "in setup", "in a section"])
    def test_a_monitor_that_has_gone_is_a_consequence(
        self, gone: str, monitor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A lost monitor is a consequence, not a cause: ft_launcher closes all monitors when one rank dies."""
        monkeypatch.setenv(failure.FILE_VARIABLE, str(tmp_path / "rank_0.failure"))
        (server,) = multiprocessing.active_children()

        def go(when: str) -> None:
            if when == gone:
                server.kill()
                server.join(20)

        go("before")
        with pytest.raises(failure.LostContact, match="monitor of this rank does not respond"), failure.noted():
            with sections.watch_rank(SectionTimeouts(update=77.0), monitor.parent):
                go("in setup")
                with sections.section("update"):
                    go("in a section")
        found = failure.read(tmp_path / "rank_0.failure")
        assert found is not None and found.lost_contact
        assert root_cause({0: found}, killed=True) is None and root_cause({0: found}, killed=False) == (0, found)

    def test_without_a_monitor_a_section_does_nothing(self, tmp_path: Path) -> None:
        with sections.watch_rank(SectionTimeouts(), tmp_path) as is_set_up, sections.section("update"):
            is_set_up()


class TestFormerEngine:
    def test_an_engine_waits_until_the_former_one_is_gone(self, tmp_path: Path) -> None:
        log = tmp_path / "engine_0.log"
        former = EngineProcess("engine 0", lambda folder: SLEEP, 1, log)
        time.sleep(1)
        os.kill(former.pid, 15)  # as SIGTERM from its supervisor: it must still end its process tree
        second = EngineProcess("engine 0", lambda folder: SLEEP, 1, log)
        try:
            assert former.exit_code() is not None
        finally:
            second.close()

    def test_one_that_does_not_go_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "FORMER_ENGINE_S", 0.3)
        log = tmp_path / "engine_0.log"
        former = EngineProcess("engine 0", lambda folder: SLEEP, 1, log)
        try:
            with pytest.raises(EngineStartError, match="engine 0 did not start: an engine .* still runs after 0.3 s"):
                EngineProcess("engine 0", lambda folder: SLEEP, 1, log)
        finally:
            former.close()


def test_a_barrier_that_another_rank_has_left_is_a_consequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's message about a missing rank in a barrier counts as lost contact. The missing rank is the cause."""
    monkeypatch.setenv(failure.FILE_VARIABLE, str(tmp_path / "rank_0.failure"))
    failure.note(RuntimeError("[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 84000 ms"))
    found = failure.read(tmp_path / "rank_0.failure")
    assert found is not None and found.lost_contact


@pytest.mark.parametrize(
    ("is_consequence", "said"),
    [
        (True, "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:12345"),
        (True, "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation to complete"),
        (True, "Application timeout caused pair closure (gloo)"),
        (True, "NCCL error in: nccl.cpp:26, remote process exited or there was a network error, NCCL version 2.27.5"),
        (True, "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(Seq=4) ran for 6 ms before timing out"),
        (True, "NCCL communicator was aborted on rank 1."),
        (True, "wait timeout after 60000ms, keys: /default_pg/0//cuda//1 (TCPStore)"),
        (True, "Gloo connectFullMesh failed with [pair.cc:144] no error"),
        (False, "NCCL error in: nccl.cpp:26, invalid usage. Last error: Duplicate GPU detected : rank 1 and rank 0"),
        (False, "NCCL error: unhandled system error. Last error: creating segment /dev/shm/nccl failed"),
        (False, "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
        (False, "Backend gloo does not support reduce_scatter"),
        (False, "CUDA error: an illegal memory access was encountered (in the NCCL kernel of all_reduce)"),
    ],
)  # fmt: skip
def test_only_a_lost_peer_is_a_consequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_consequence: bool, said: str
) -> None:
    """Only a lost peer is a consequence. A mistake that NCCL or gloo detects on one rank is a cause: the others then
    lose contact with that rank."""
    monkeypatch.setenv(failure.FILE_VARIABLE, str(tmp_path / "rank_0.failure"))
    failure.note(RuntimeError(said))
    found = failure.read(tmp_path / "rank_0.failure")
    assert found is not None and found.lost_contact is is_consequence


class Silent:
    """A heartbeat channel whose other ranks are gone."""

    @contextlib.contextmanager
    def sent_while_working(self, what: str) -> Iterator[None]:
        yield

    def send(self, message: object) -> None:
        raise LostRankError("no sign of life from rank 1")


def test_what_failed_on_rank_0_is_said_also_where_no_other_rank_is_left_to_hear_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world: Any = World.__new__(World)
    world.is_main, world._heartbeat, world._rank_zero, world._control = True, Silent(), _RankZero(), None

    def fails(error: Exception) -> None:
        raise error

    world._together = fails
    monkeypatch.setattr("mrl.trainers.shared.world.gather", lambda *_: fails(RuntimeError("Connection closed")))
    with pytest.raises(KeyError, match="no such model"):
        world._run_together(KeyError("no such model"))
    with pytest.raises(RankZeroError, match="validation failed: OSError: the reward's file is gone"):
        world.from_main("validation", lambda: fails(OSError("the reward's file is gone")))
    for make in (lambda: fails(RuntimeError("gloo: Connection closed by peer")), lambda: None):
        with pytest.raises(LostRankError, match="no sign of life from rank 1"):
            world.from_main("validation", make)
