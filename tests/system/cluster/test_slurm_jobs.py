"""slurm/run.sh under a real Slurm of two virtual nodes, with a fast stand-in for `mrl`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.slurm_cluster import Cluster, missing
from tests.helpers.train_tools import ROOT

pytestmark = pytest.mark.long

JOBS = sorted(file for file in (ROOT / "slurm").glob("*.sh") if file.name != "run.sh")
# Stands in for python: prints its arguments, and exits with 75 on the warning signal, unless its child got the signal
# too.
STAND_IN = """#!/bin/bash
echo "told: $*"
[[ $3 == preflight && $LOOKS == bad && $SLURM_NODEID == 1 ]] && exit 1
[[ $3 == preflight && $LOOKS == bad ]] && sleep 60
[[ $3 == preflight && $LOOKS == slow && $SLURM_RESTART_COUNT != 1 ]] && sleep 4
[[ $3 == preflight ]] && exit 0
[[ $ENDS == at_once && $SLURM_NODEID == 1 ]] && exit 3
[[ $ENDS == second_time && $SLURM_RESTART_COUNT == 1 || $ENDS == well ]] && exit 0
[[ $ENDS == deaf ]] && { ((SLURM_RESTART_COUNT)) && exit 0; kill -USR1 $$; }
sleep 120 & helper=$!
trap 'kill -0 $helper && { kill $helper; exit 75; }; exit 4' USR1
echo ready
wait $helper
"""


@dataclass
class Desk:
    """The folder and the cluster of the submitted jobs."""

    slurm: Cluster
    folder: Path

    @property
    def logs(self) -> Path:
        return self.folder / f"logs of {len(self.slurm.names)} nodes"

    def submit(self, ends: str, *arguments: str, nodes: int = 2, **environment: str) -> str:
        there = {"VENV": str(self.folder / "venv"), "LOG_DIR": str(self.logs), "MRL_HOME": str(ROOT)}
        script = str(ROOT / "slurm" / "ppo_tiny_cpu.sh")
        size = f"--nodes={nodes}"
        return self.slurm.submit(self.folder, size, script, *arguments, **there, **environment, ENDS=ends)

    def log(self, job: str, node: str) -> str:
        file = self.logs / f"ppo_tiny_cpu_{job}_{node}.log"
        return file.read_text() if file.exists() else ""

    def phases(self, job: str) -> str:
        return (self.folder / f"ppo_tiny_cpu_{job}.log").read_text()

    def ended(self, job: str) -> tuple[str, str]:
        """Waits until the job has ended, and returns its state and exit code."""
        states = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.slurm.wait_for(lambda: self.slurm.field(job, "JobState") in states, 90)
        return self.slurm.field(job, "JobState"), self.slurm.field(job, "ExitCode")

    def warn(self, job: str) -> None:
        """Sends the warning of `#SBATCH --signal=B:USR1@...` before the time limit, once all nodes have started."""
        self.slurm.wait_for(lambda: all("ready" in self.log(job, node) for node in ("n1", "n2")), 60)
        self.slurm.call("scancel", "--batch", "--signal=USR1", job)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    if absent := missing():
        packages = "slurmctld slurmd slurm-client munge"
        pytest.skip(f"Slurm is not installed ({', '.join(absent)} missing): apt-get install {packages}")
    folder = tmp_path_factory.mktemp("jobs")
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    with contextlib.closing(Cluster()) as slurm:
        yield Desk(slurm, folder)


def test_each_node_gets_its_own_place_and_the_same_head(desk: Desk) -> None:
    job = desk.submit("well", "run.steps=7")
    assert desk.ended(job) == ("COMPLETED", "0:0")
    told = [re.search(r"told: -m mrl train (\S+) (.*)", desk.log(job, node)) for node in ("n1", "n2")]
    places = [re.search(r"run.steps=7 --nodes 2 --node (\d) --head (127.0.1.1:2\d{4})$", one[2]) for one in told if one]
    assert [place[1] for place in places if place] == ["0", "1"]
    assert len({place[2] for place in places if place}) == 1
    assert re.search(
        r"ppo_tiny_cpu \d+\.0: nodes n\[1-2\], head .*, commit \w+\n.*preflight of n1,n2\n(?s:.*)starting: ",
        desk.phases(job),
    )


def test_the_nodes_look_at_each_other_first(desk: Desk) -> None:
    """The nodes' preflight uses another port than the run. A failing node is named, and the run does not start."""
    job = desk.submit("well", "run.steps=7")
    assert desk.ended(job) == ("COMPLETED", "0:0")
    looks = [re.search(r"told: -m mrl preflight .* --head (\S+)\ntold: .* --head (\S+)\n", desk.log(job, "n1"))]
    assert all(look and look[1] != look[2] for look in looks), desk.log(job, "n1")
    job = desk.submit("well", LOOKS="bad")
    assert desk.ended(job) == ("FAILED", "1:0")
    assert "something wrong on n2 1 " in desk.phases(job) and "starting" not in desk.phases(job)


@pytest.mark.parametrize(("seen", "code"), [("192.0.2.7", "0:0"), ("127.0.1.1", "1:0")])
def test_a_head_that_its_own_hosts_file_has_at_loopback_is_where_the_others_see_it(
    desk: Desk, seen: str, code: str
) -> None:
    tools = desk.folder / f"hosts that see {seen}"
    tools.mkdir()
    scontrol = f"{shutil.which('scontrol')} \"$@\" | sed 's/NodeAddr=[^ ]*/NodeAddr=n1/'"
    getent = f'[[ $2 == n1 && $SLURM_STEP_ID == [0-9]* ]] && echo "{seen} STREAM" || echo 127.0.1.1 STREAM'
    for name, line in {"scontrol": scontrol, "getent": getent}.items():
        (tools / name).write_text(f"#!/bin/bash\n{line}\n")
        (tools / name).chmod(0o755)
    job = desk.submit("well", PATH=f"{tools}:{os.environ['PATH']}")
    assert desk.ended(job)[1] == code, desk.phases(job)
    if seen.startswith("127."):
        assert "error: n1 is 127.0.1.1 on n2 too" in desk.phases(job)
    else:
        heads = [re.search(r"train .* --head (\S+):\d+$", desk.log(job, node), re.M) for node in ("n1", "n2")]
        assert [head[1] for head in heads if head] == [seen, seen]


def test_the_last_nodes_serve_engines_where_a_job_says_so(desk: Desk) -> None:
    job = desk.submit("well", "run.steps=7", ENGINE_NODES="1")
    assert desk.ended(job) == ("COMPLETED", "0:0")
    told = [re.search(r"told: -m mrl (\w+) \S+ (.*)", desk.log(job, node)) for node in ("n1", "n2")]
    assert [one[1] for one in told if one] == ["train", "serve"]
    trainer, engines = (one[2] for one in told if one)
    assert trainer.endswith("run.steps=7 placement.nodes=1"), "the one node of its world"
    assert re.search(r"run.steps=7 placement.nodes=1 run.nodes=1 --node 0 --head 127.0.1.1$", engines)
    job = desk.submit("well", ENGINE_NODES="2")
    assert desk.ended(job) == ("FAILED", "1:0") and "leave none for the trainer" in desk.phases(job)


def test_nodes_that_serve_do_not_look_as_nodes_of_the_trainer(desk: Desk) -> None:
    with contextlib.closing(Cluster(nodes=3)) as slurm:
        three = Desk(slurm, desk.folder)
        job = three.submit("well", "run.steps=8", nodes=3, ENGINE_NODES="1")
        assert three.ended(job) == ("COMPLETED", "0:0")
    logs = [three.log(job, node) for node in ("n1", "n2", "n3")]
    assert [re.findall(r"-m mrl (\w+)", log) for log in logs] == [["preflight", "train"]] * 2 + [["serve"]]
    places = [re.search(r"train .* --nodes 2 --node (\d)", log) for log in logs[:2]]
    assert [place[1] for place in places if place] == ["0", "1"]
    assert re.search(r"serve .* --node 0 --head", logs[2])


def test_who_is_told_to_stop_in_preflight_starts_nothing_and_goes_on_later(desk: Desk) -> None:
    job = desk.submit("well", LOOKS="slow")
    desk.slurm.wait_for(lambda: all("preflight" in desk.log(job, node) for node in ("n1", "n2")), 60)
    desk.slurm.call("scancel", "--batch", "--signal=USR1", job)
    assert desk.ended(job) == ("COMPLETED", "0:0"), desk.phases(job)
    assert "told to stop before the run began; the job goes on" in desk.phases(job)
    assert desk.phases(job).count("starting: ") == 1


def test_who_is_told_to_stop_and_saves_goes_on_under_the_same_number(desk: Desk) -> None:
    """A warned job saves and is requeued under the same number. Only `mrl` gets the signal, not its children."""
    job = desk.submit("second_time")
    desk.warn(job)
    assert desk.ended(job) == ("COMPLETED", "0:0"), desk.phases(job)
    assert desk.slurm.field(job, "Restarts") == "1"
    assert "told to stop" in desk.phases(job) and "saved and left" in desk.phases(job)
    heads = re.findall(r"mrl train .* --head (\S+)", desk.log(job, "n1"))
    assert len(heads) == len(set(heads)) == 2, "an attempt met at a former one's port"


def test_who_is_told_before_python_listens_goes_on_too(desk: Desk) -> None:
    job = desk.submit("deaf")
    assert desk.ended(job) == ("COMPLETED", "0:0"), desk.phases(job)
    assert desk.slurm.field(job, "Restarts") == "1"


def test_a_job_that_has_gone_on_often_enough_ends_with_mrl_s_code(desk: Desk) -> None:
    job = desk.submit("never", MAX_REQUEUES="0")
    desk.warn(job)
    assert desk.ended(job) == ("FAILED", "75:0"), desk.phases(job)


def test_one_node_s_failure_ends_the_job_with_its_code(desk: Desk) -> None:
    job = desk.submit("at_once")
    assert desk.ended(job) == ("FAILED", "3:0"), desk.phases(job)
    desk.slurm.wait_for(lambda: not desk.slurm.processes_of(job), 30)


@pytest.mark.parametrize(
    "misses", ["the end of its step", pytest.param("to end the other node", marks=pytest.mark.slow)]
)
def test_what_srun_misses_holds_nobody_up(desk: Desk, misses: str) -> None:
    """The job fails and is not tried again if srun misses the end of a step, as happens when a process fails while the
    step starts. No node is lost."""
    deaf = desk.folder / misses / "srun"
    deaf.parent.mkdir()
    words, after = '"$@"', "[[ $* != *job-name=run* ]] || exec sleep 100"
    if misses != "the end of its step":
        words, after = '"${@/--kill-on-bad-exit=1/--kill-on-bad-exit=0}"', ""
    deaf.write_text(f"#!/bin/bash\n{shutil.which('srun')} {words}\ncode=$?\n{after}\nexit $code\n")
    deaf.chmod(0o755)
    job = desk.submit("at_once", PATH=f"{deaf.parent}:{os.environ['PATH']}")
    assert desk.ended(job) == ("FAILED", "3:0"), desk.phases(job)
    assert "goes on" not in desk.phases(job)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [({"CONFIG": "none.yaml"}, "there is no none.yaml"), ({"VENV": "/none"}, "there is no /none/bin")],
)
def test_what_a_job_lacks_is_said_before_anything_starts(desk: Desk, wrong: dict[str, str], reason: str) -> None:
    there = {"VENV": str(desk.folder / "venv"), "MRL_HOME": str(ROOT), "ENDS": "well"} | wrong
    job = desk.slurm.submit(desk.folder, str(ROOT / "slurm" / "ppo_tiny_cpu.sh"), **there)
    assert desk.ended(job) == ("FAILED", "1:0")
    assert reason in desk.phases(job)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_every_job_is_a_header_over_the_one_runner(job: Path) -> None:
    assert subprocess.run(["bash", "-n", job], check=False).returncode == 0
    text = job.read_text()
    assert f"#SBATCH --job-name={job.stem}\n" in text
    assert text.splitlines()[-1] == 'source "${MRL_HOME:-$SLURM_SUBMIT_DIR}/slurm/run.sh"'
    if job.stem != "convert":
        assert {"--requeue", "--signal=B:USR1", "--open-mode=append"} <= set(re.findall(r"--[\w=:-]+", text))
