"""A real Slurm cluster on loopback: munged, slurmctld and one slurmd per virtual node, run by this user in a temporary
folder. munged requires that every account can enter the folder.

It needs Debian's packages slurmctld, slurmd, slurm-client and munge; `missing` lists the programs that are absent.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from mrl.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
DAEMONS = ("slurmctld", "munged")
CONF = """
ClusterName=loop
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={run}/munge.socket,cred_expire=5
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool-%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
SlurmctldLogFile={run}/slurmctld.log
SlurmdLogFile={run}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={run}/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
KillWait=10
SlurmdTimeout=10
SlurmctldTimeout=30
InactiveLimit=0
WaitTime=0
MinJobAge=600
ReturnToService=2
UnkillableStepTimeout=30
MailProg=/bin/true
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Returns the programs of Slurm that this machine lacks."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


class Cluster:
    """A Slurm cluster, which runs from construction to `close`. cpus: of each node, whatever the machine has"""

    def __init__(self, nodes: int = 2, cpus: int = 8) -> None:
        self.run = Path(tempfile.mkdtemp(prefix="mrl-slurm-", dir="/tmp"))
        self.names = [f"n{number + 1}" for number in range(nodes)]
        self.env = {**os.environ, "SLURM_CONF": str(self.run / "slurm.conf")}
        self.env["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
        (self.run / "state").mkdir()
        self.run.chmod(0o755)
        self._write_conf(cpus)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _write_conf(self, cpus: int) -> None:
        host, user = socket.gethostname().partition(".")[0], psutil.Process().username()
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.1.{number + 1} Port={free_port()} CPUs={cpus} "
            "RealMemory=8000 State=UNKNOWN"
            for number, name in enumerate(self.names)
        ]
        conf = CONF.format(run=self.run, host=host, user=user, port=free_port(), nodes="\n".join(lines))
        (self.run / "slurm.conf").write_text(conf)
        key = self.run / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))

    def _start(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        own = [f"--{name}={self.run / file}" for name, file in {**files, "seed-file": "munge.seed"}.items()]
        self.call("munged", *own, "--num-threads=2")
        self.call("slurmctld", "-i")
        for name in self.names:
            self.call("slurmd", "-N", name)
        self.wait_for(lambda: self.call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == self.names, 30)

    def call(self, *command: str, check: bool = True) -> str:
        """Runs a Slurm command and returns its output."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def wait_for(self, happens: object, seconds: float) -> None:
        """Waits until `happens()` is true. Fails with the end of the logs after `seconds`."""
        assert callable(happens)
        end = time.monotonic() + seconds
        while not happens():
            assert time.monotonic() < end, "\n".join(file.read_text()[-1500:] for file in self.run.glob("*.log"))
            time.sleep(0.1)

    def submit(self, folder: Path, *arguments: str, **environment: str) -> str:
        """Submits a job from `folder` and returns its number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            cwd=folder,
            env={**self.env, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """Returns a field of the job, such as JobState, ExitCode or Restarts."""
        shown = self.call("scontrol", "show", "job", "-o", job)
        return dict(word.partition("=")[::2] for word in shown.split())[name]

    def processes_of(self, job: str) -> list[psutil.Process]:
        """Returns the processes of the job's steps, recognized by the environment that Slurm sets."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                if environ.get("SLURM_CONF") == self.env["SLURM_CONF"] and environ.get("SLURM_JOB_ID") == job:
                    found.append(process)
        return found

    def kill_node(self, name: str) -> None:
        """Kills the node's daemon, its step daemons and every process of the node with SIGKILL."""
        victims = [psutil.Process(int((self.run / f"slurmd-{name}.pid").read_text()))]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environ = process.environ()
                if environ.get("SLURM_CONF") == self.env["SLURM_CONF"] and environ.get("SLURMD_NODENAME") == name:
                    victims += [process, *(one for one in process.parents() if one.name() == "slurmstepd")]
        for process in set(victims):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def close(self) -> None:
        """Ends the jobs, then the daemons, by their pid files."""
        user = psutil.Process().username()
        if (self.run / "slurmctld.pid").exists():
            self.call("scancel", "--full", "--signal=KILL", f"--user={user}", check=False)
            self.call("scancel", f"--user={user}", check=False)
            with contextlib.suppress(AssertionError):
                self.wait_for(lambda: not self.call("squeue", "-h", check=False).strip(), 20)
        daemons = [self._daemon(name) for name in (*(f"slurmd-{name}" for name in self.names), *DAEMONS)]
        running = [daemon for daemon in daemons if daemon is not None]
        for signal_it in (psutil.Process.terminate, psutil.Process.kill):
            for daemon in running:
                with contextlib.suppress(psutil.NoSuchProcess):
                    signal_it(daemon)
            _, running = psutil.wait_procs(running, 10)
        shutil.rmtree(self.run, ignore_errors=True)

    def _daemon(self, name: str) -> psutil.Process | None:
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            process = psutil.Process(int((self.run / f"{name}.pid").read_text()))
            return process if process.name() == name.partition("-")[0] else None
        return None
