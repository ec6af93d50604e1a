"""A run over several nodes: two launchers on this machine act as two nodes, and a real Slurm has two virtual nodes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from mrl.observe import read_metrics
from mrl.ports import free_port
from tests.conftest import TinyModels
from tests.helpers import zygote
from tests.helpers.runs import results, samples
from tests.helpers.slow import RUN_SLOW
from tests.helpers.slurm_cluster import Cluster, missing
from tests.helpers.train_tools import ROOT, write_config

pytestmark = pytest.mark.longest

LIMIT_S = 300.0
STEPS = 8 if RUN_SLOW else 5
# The pipeline stages are on different nodes, tensor parallelism stays on one; each node has its engine.
# Idle models and engines release their memory, on both nodes at once.
PPO: dict[str, Any] = {
    "actor": {"parallel": {"tensor": 2, "pipeline": 2}, "optimizer": {"lr": 5e-3}, "offload": "all"},
    "critic": {"parallel": {"tensor": 2, "pipeline": 2}, "optimizer": {"lr": 5e-3}, "offload": "all"},
    "run": {"steps": STEPS, "nproc": 2},
    "algorithm": {"adv_estimator": "gae", "lam": 0.95},
    "rollout": {"engine": "transformers", "release": "all"},
    "sync": {"verify": "checksum", "bucket_mib": 1, "timeout_s": 60.0},
    "checkpoint": {"every_steps": 1, "keep_last": 2, "export_hf": True},
}


@dataclass
class Setting:
    folder: Path
    config: Path

    def run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name


@pytest.fixture(scope="module")
def setting(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("cluster")
    return Setting(folder, write_config(folder, tiny_models("llama"), **PPO))


def wait_for(happens: Callable[[], object], say: Callable[[], str]) -> None:
    end = time.monotonic() + LIMIT_S
    while not happens():
        assert time.monotonic() < end, say()[-6000:]
        time.sleep(0.05)


def steps_made(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def engine_of(run_dir: Path, number: int) -> psutil.Process:
    """Returns the process of engine `number`, recognized by the log file that it writes to."""
    log = str(run_dir / "logs" / f"engine_{number}.log")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            line = " ".join(process.cmdline())
            if "transformers_engine.server" in line and "supervisor" not in line:
                if os.readlink(f"/proc/{process.pid}/fd/1") == log:
                    return process
    raise AssertionError(f"nobody writes to {log}")


@contextlib.contextmanager
def two_launchers(setting: Setting, *overrides: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Starts `mrl train --nodes 2` twice."""
    head, log = f"127.0.0.1:{free_port()}", (setting.folder / "by_hand.log").open("ab")
    command = [sys.executable, "-m", "mrl", "train", str(setting.config), *overrides, "--nodes=2", f"--head={head}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = []
    try:
        for number in range(2):
            nodes.append(zygote.start([*command, f"--node={number}"], env, ROOT, stdout=log, stderr=log))
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.wait(30)


@pytest.fixture(scope="module")
def whole(setting: Setting) -> Path:
    """Runs the job by hand under ft_launcher. The second node's engine is killed during the run."""
    run_dir = setting.run_dir("whole")
    log = setting.folder / "by_hand.log"
    with two_launchers(setting, "run.name=whole", "run.launcher=ft") as nodes:
        wait_for(lambda: steps_made(run_dir) >= 2 or any(node.poll() for node in nodes), log.read_text)
        engine_of(run_dir, 1).kill()
        codes = [node.wait(LIMIT_S) for node in nodes]
    assert codes == [0, 0], log.read_text()[-6000:]
    return run_dir


def test_an_engine_of_another_node_comes_back_with_its_weights(whole: Path, setting: Setting) -> None:
    """The engine's own node restarts it. Later syncs are verified on both engines, or the run would have ended."""
    rows = results(whole)
    assert sorted(rows) == list(range(1, STEPS + 1))
    assert sum(row["rollout/engine_restarts"] for row in rows.values()) == 1
    assert "engine 1 on node 1" in (setting.folder / "by_hand.log").read_text()


def test_what_a_push_sends_over_the_network_is_the_model_once(whole: Path) -> None:
    size = json.loads((whole / "hf" / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    for row in read_metrics(whole):
        assert row["sync/network_bytes"] == size
        assert row["sync/engine_bytes"] == 2 * row["sync/network_bytes"]
        assert row["perf/sync_network_s"] > 0 and row["perf/sync_engine_s"] > 0


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if absent := missing():
        pytest.skip(
            f"Slurm is not installed ({', '.join(absent)} missing): apt-get install slurmctld slurmd slurm-client munge"
        )
    with contextlib.closing(Cluster()) as cluster:
        yield cluster


def submit(slurm: Cluster, setting: Setting, *overrides: str, **environment: str) -> str:
    places = {"CONFIG": str(setting.config), "MRL_HOME": str(ROOT), "LOG_DIR": str(setting.folder / "logs")}
    script, run = str(ROOT / "slurm" / "ppo_tiny_cpu.sh"), ["run.nproc=2", "checkpoint.every_steps=1", *overrides]
    return slurm.submit(setting.folder, script, *run, **places, **environment, VENV=sys.prefix, LOST_S="12")


def said(setting: Setting) -> str:
    files = [*setting.folder.glob("ppo_tiny_cpu_*.log"), *(setting.folder / "logs").glob("*")]
    return "\n".join(f"--- {file.name}\n{file.read_text()[-2500:]}" for file in sorted(files))


def state(slurm: Cluster, job: str) -> str:
    return slurm.field(job, "JobState")


def test_a_job_that_loses_a_node_ends_as_the_undisturbed_run(slurm: Cluster, setting: Setting, whole: Path) -> None:
    """A job that loses a node ends with the same results. `make test-all` also warns the job's script first, as
    `#SBATCH --signal=B:USR1@...` does."""
    run_dir = setting.run_dir("submitted")
    job = submit(slurm, setting, "run.name=submitted", PREFLIGHT="no")

    def wait_for_step(number: int) -> None:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        wait_for(lambda: steps_made(run_dir) >= number or state(slurm, job) in ended, lambda: said(setting))
        assert state(slurm, job) == "RUNNING", said(setting)

    wait_for_step(1)
    if RUN_SLOW:
        slurm.call("scancel", "--batch", "--signal=USR1", job)
        wait_for(lambda: slurm.field(job, "Restarts") == "1", lambda: said(setting))
        made = steps_made(run_dir)
        assert 1 <= made < STEPS - 2, "too late to tell"
        wait_for_step(made + 1)
    slurm.kill_node("n2")
    slurm.call("slurmd", "-N", "n2")
    assert steps_made(run_dir) < STEPS, "too late to tell"
    restarts = "2" if RUN_SLOW else "1"
    wait_for(lambda: slurm.field(job, "Restarts") == restarts or state(slurm, job) == "FAILED", lambda: said(setting))
    wait_for(lambda: state(slurm, job) in ("COMPLETED", "FAILED"), lambda: said(setting))
    assert state(slurm, job) == "COMPLETED", said(setting)
    assert samples(run_dir) == samples(whole)
    assert _learnt(run_dir) == _learnt(whole)
    for file in (whole / "hf").glob("*.safetensors"):
        assert (run_dir / "hf" / file.name).read_bytes() == file.read_bytes()


def _learnt(run_dir: Path) -> dict[int, dict[str, float]]:
    """Returns the metrics without the engine's restart, which happened in one run only."""
    rows = results(run_dir).items()
    return {step: {k: v for k, v in row.items() if k != "rollout/engine_restarts"} for step, row in rows}


@pytest.mark.slow
def test_a_cancelled_job_leaves_nothing(slurm: Cluster, setting: Setting) -> None:
    """A cancelled job leaves no process: eight ranks, TP2 x PP2 x DP2 over both nodes, with an SGLang server on
    each."""
    run_dir = setting.run_dir("cancelled")
    size = ["run.nproc=4", "rollout.engine=sglang"]
    job = submit(
        slurm, setting, "run.name=cancelled", "run.steps=1000", "checkpoint.every_steps=1000", *size, PREFLIGHT="no"
    )
    wait_for(lambda: steps_made(run_dir) >= 1 or state(slurm, job) == "FAILED", lambda: said(setting))
    assert state(slurm, job) == "RUNNING", said(setting)
    log = (setting.folder / "logs" / f"ppo_tiny_cpu_{job}_n1.log").read_text()
    assert "TP2 x PP2 x DP2 over 8 ranks" in log and "2 engines have the weights of step 0, all 21 tensors" in log
    assert len(slurm.processes_of(job)) > 12
    slurm.call("scancel", job)
    wait_for(lambda: state(slurm, job) == "CANCELLED", lambda: said(setting))
    wait_for(lambda: not slurm.processes_of(job), lambda: f"{slurm.processes_of(job)}\n{said(setting)}")


@pytest.mark.slow
def test_the_last_node_of_a_job_serves_the_engines(slurm: Cluster, setting: Setting) -> None:
    run_dir = setting.run_dir("apart")
    together = ["rollout.release=none", *(f"{model}.parallel.pipeline=1" for model in ("actor", "critic"))]
    apart = ["placement.mode=disaggregated", "run.name=apart", "run.steps=2", *together]
    job = submit(slurm, setting, *apart, ENGINE_NODES="1")
    wait_for(lambda: state(slurm, job) in ("COMPLETED", "FAILED"), lambda: said(setting))
    assert state(slurm, job) == "COMPLETED", said(setting)
    assert [row["rollout/engines"] for row in read_metrics(run_dir)] == [1.0, 1.0]
    serving = (setting.folder / "logs" / f"ppo_tiny_cpu_{job}_n2.log").read_text()
    assert "engine node 0: ready: engine 0 at http://" in serving and "engine node 0: ends: over" in serving
    wait_for(lambda: not slurm.processes_of(job), lambda: str(slurm.processes_of(job)))


@pytest.mark.slow
def test_a_mistake_ends_the_job_with_what_is_wrong(slurm: Cluster, setting: Setting) -> None:
    job = submit(slurm, setting, "run.name=wrong", "actor.parallel.tensor=3")
    wait_for(lambda: state(slurm, job) in ("COMPLETED", "FAILED"), lambda: said(setting))
    assert state(slurm, job) == "FAILED"
    assert slurm.field(job, "ExitCode") == "2:0"
    assert "actor.parallel.tensor" in (setting.folder / "logs" / f"ppo_tiny_cpu_{job}_n1.log").read_text()


@pytest.mark.parametrize("arguments", [["--nodes=2"], ["--nodes=2", "--node=2", "--head=a:1"], ["--node=0"]])
def test_a_node_that_does_not_know_its_place_is_refused(arguments: list[str], setting: Setting) -> None:
    command = [sys.executable, "-m", "mrl", "train", str(setting.config), *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and "--node" in done.stderr
