"""`mrl train` as a user runs it: a separate process, its terminal output, and the processes that it leaves running."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import yaml

from mrl.inference.engine import Engine
from mrl.resilience.rank import process_name
from tests.helpers import zygote

ROOT = Path(__file__).parents[2]
REWARD = """
def lower_case(prompt, response, row):
    return {"score": sum(c.islower() for c in response) / 16, "length": len(response)}
"""


# metrics of speed and memory, which differ from run to run
MEASURED = ("queue/", "time/", "perf/", "plan/", "memory/", "engines/", "unix_time")
MEASURED += ("checkpoint/copy_s", "checkpoint/write_s")
MADE_UP = dict.fromkeys(("warn", "stop", "warn_sample", "stop_sample"))  # rollout.mismatch for made-up samples


def write_config(folder: Path, model: Path, **sections: dict[str, Any] | None) -> Path:
    """Writes FOLDER/config.yaml, FOLDER/{train,validation}.jsonl and FOLDER/reward.py: a small GRPO run in one process.
    `sections` override its settings."""
    for name, count in (("train", 24), ("validation", 4)):
        rows = (json.dumps({"prompt": f"{name} {n} + {n * n} =", "answer": str(n + n * n)}) for n in range(count))
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "reward.py").write_text(REWARD)
    config: dict[str, Any] = {
        "trainer": "rl",
        "run": {"name": "run", "root": str(folder / "runs"), "steps": 1, "trackers": [], "timeout_s": 120.0},
        "model": {"path": str(model), "dtype": "float32"},
        "actor": {"optimizer": {"lr": 1e-3}},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2},
        "rollout": {"sampling": {"max_new_tokens": 16}, "request_timeout_s": 60.0},
        "sync": {"timeout_s": 30.0},
        "reward": {"function": f"{folder / 'reward.py'}:lower_case"},
        "algorithm": {"adv_estimator": "grpo"},
    }
    for key, section in sections.items():
        config[key] = section if section is None else {**config.get(key, {}), **section}
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def given(engine: Engine, folder: Path) -> dict[str, Any]:
    """Returns the keys of `rollout` with which a run uses a running engine."""
    file = folder / "engine.key"
    file.touch(0o600)
    file.write_text(engine.pool.access.api_key or "")
    return {"urls": list(engine.urls), "api_key_file": str(file)}


class Train:
    """A process that runs `mrl train CONFIG OVERRIDES`, with `environment` added to this process's. Use it as a context
    manager, which ends the run.

    terminal: its output so far; copied: fork the process from one that has done the imports
    """

    command = "train"

    def __init__(self, folder: Path, *arguments: str | Path, copied: bool = True, **environment: str) -> None:
        mark = uuid.uuid4().hex
        self._folder = folder.absolute()
        self._mark = f"{zygote.MARK}={mark}"
        self._file = folder / f"terminal_{uuid.uuid4().hex[:6]}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), zygote.MARK: mark, **environment}
        with self._file.open("wb") as out:
            self._process = (zygote.start if copied else subprocess.Popen)(
                [sys.executable, "-m", "mrl", self.command, *map(str, arguments)],
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._seen: set[int] = set()

    def __enter__(self) -> Train:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()  # the kernel then ends its ranks, and the supervisors end the engines
            self._process.wait(30)

    @property
    def terminal(self) -> str:
        return self._file.read_text()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int:
        """Returns the exit code. Fails if the process runs longer than `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:.0f} s\n{self.terminal[-4000:]}") from None

    def wait_for(self, text: str, seconds: float = 240) -> None:
        """Waits until `text` is on the terminal, and records all processes of the run."""
        end = time.monotonic() + seconds
        while text not in self.terminal:
            assert self._process.poll() is None, f"ended before {text!r} came\n{self.terminal[-4000:]}"
            assert time.monotonic() < end, f"{text!r} did not come\n{self.terminal[-4000:]}"
            time.sleep(0.05)
        self.processes()

    def processes(self) -> dict[int, str]:
        """Returns the command lines of the run's processes: all descendants, and those with the run's mark."""
        table = _process_table()
        found = {self._process.pid} | {pid for pid in table if self._mark in _read(pid, "environ")}
        owners = {pid: _owner(pid) for pid in table if self._is_supervisor(pid)}
        found |= {pid for pid, owner in owners.items() if owner not in table}
        grown = True
        while grown:
            more = {pid for pid, parent in table.items() if parent in found or owners.get(pid) in found} - found
            found, grown = found | more, bool(more)
        self._seen |= found
        return {pid: _read(pid, "cmdline").replace("\0", " ") for pid in found}

    def _is_supervisor(self, pid: int) -> bool:
        """Returns True for the supervisor of an engine of this run. The supervisor need not be a child of the engine's
        owner. Supervisors of engines that the tests start write their output elsewhere."""
        output = _output(pid)
        is_in_a_run = output.parent.name == "logs" and self._folder in output.parents
        return is_in_a_run and "supervisor.py" in _read(pid, "cmdline")

    def pid_of(self, *parts: str) -> int:
        """Returns the one process whose command line has all of `parts` and which is not an engine's supervisor."""
        found = [
            pid
            for pid, line in self.processes().items()
            if all(part in line for part in parts) and "supervisor.py" not in line
        ]
        assert len(found) == 1, (parts, self.processes())
        return found[0]

    def pid_of_rank(self, rank: int) -> int:
        return next(pid for pid in self.processes() if _read(pid, "comm").strip() == process_name(rank))

    def left_running(self) -> dict[int, str]:
        """Returns the processes of the run that are alive 10 s after its end; empty if all have ended."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            self._seen |= self.processes().keys()
            alive = {pid for pid in self._seen & _process_table().keys() if pid != self._process.pid}
            if not alive:
                return {}
            time.sleep(0.1)
        return {pid: _read(pid, "cmdline") for pid in alive}


def _process_table() -> dict[int, int]:
    """Returns pid -> parent pid of all processes except zombies."""
    table = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (text := _read(int(folder.name), "stat")):
            state, parent = text.rpartition(")")[2].split()[:2]
            if state not in ("Z", "X"):
                table[int(folder.name)] = int(parent)
    return table


def _output(pid: int) -> Path:
    """Returns the file that the process writes its stdout to."""
    try:
        return Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:  # the process has ended, or belongs to another user
        return Path("/")


def _owner(pid: int) -> int:
    """Returns the process whose end a supervisor waits for, else the parent; -1 if it has ended."""
    files = Path(f"/proc/{pid}/fdinfo")
    with contextlib.suppress(OSError):
        for file in files.iterdir():
            told = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
            if "Pid" in told:
                return int(told["Pid"])
        return _process_table().get(pid, -1)
    return -1


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:  # the process has ended, or belongs to another user
        return ""
