"""Run of one untrusted, sandboxed Python program, until everything it started has ended.

With isolation "bubblewrap" a program has no network, no files except the programs and libraries of the system and
Python (read-only, without installed packages), no writable place except a temporary /tmp of `disk_mib`, no view of
other processes, no environment, no system call of `seccomp`'s list, and `Limits`, which a control group enforces where
one can be created (`groups`). With "none" it has only the limits: it can read, write, send and kill whatever the
trainer's user can, and start more processes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mrl.reward.sandbox import groups, isolate
from mrl.reward.sandbox.isolate import SandboxError
from mrl.reward.sandbox.seccomp import filter_program
from mrl.reward.sandbox.watch import Talk, WatchedProgram, watch

Isolation = Literal["bubblewrap", "none"]
START_S = 10.0  # for the sandbox itself, before the program's own clock starts
ENTER = Path(__file__).with_name("enter.py").read_text()
PROGRAM_OPTIONS = ("-s", "-P", "-B", "-X", "utf8")
OPEN_FILES = 64
STACK_MIB = 64


@dataclass(frozen=True)
class Limits:
    """Limits of a program. `memory_mib` is each process's address space: all processes and the files in /tmp use at
    most processes x memory_mib + disk_mib; a control group limits that plus kernel memory to 32 MiB more.
    """

    wall_s: float = 10.0
    memory_mib: int = 512
    disk_mib: int = 16
    processes: int = 1  # threads count
    output_kib: int = 64  # of stdout and stderr together


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program. `how`: "exit code 0", "signal SIGKILL", "time out", "too much output"."""

    how: str
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.how == "exit code 0"


def run_python(program: str, stdin: str = "", *, limits: Limits, isolation: Isolation = "bubblewrap") -> ProgramResult:
    """Runs the source text `program` with the interpreter that mrl's environment was made from, without its packages.

    No process or file of the program remains. Raises SandboxError if the sandbox is unavailable; a failure of the
    program itself is not an error.
    """
    found = _run(program, stdin.encode(errors="surrogatepass"), None, limits, isolation)
    return ProgramResult(found.how, found.text("stdout"), found.text("stderr"))


def converse_with_python(program: str, talk: Talk, *, limits: Limits, isolation: Isolation = "bubblewrap") -> None:
    """Runs a program that communicates with `talk`, which yields bytes for stdin and is sent each line of stdout.

    The program is killed when `talk` ends. If the program ends first, or exceeds its limits, `talk` is not resumed.
    """
    _run(program, next(talk), talk, limits, isolation)


def _run(program: str, text: bytes, talk: Talk | None, limits: Limits, isolation: Isolation) -> WatchedProgram:
    with ExitStack() as stack:
        ready_read, ready_write = os.pipe()
        stack.callback(os.close, ready_read)
        with os.fdopen(ready_write, "wb"):
            process = stack.enter_context(_started(program, limits, isolation, ready_write))
        found = watch(process, ready_read, text, talk, (START_S, limits.wall_s, limits.output_kib << 10))
        if found.ready != b"1":
            why = (found.ready[1:].decode(errors="replace") or found.text("stderr")).strip() or found.how
            raise SandboxError(_cannot(isolation, why))
        return found


def check_isolation(isolation: Isolation) -> None:
    """Raises SandboxError, which says what to do, if programs cannot be sandboxed."""
    if isolation == "none":
        return
    ended = run_python("print(6 * 7)", limits=Limits())
    if ended.stdout != "42\n":
        raise SandboxError(_cannot(isolation, f"a test program ended with {ended.how}: {ended.stderr.strip()}"))


def find_sandbox() -> tuple[str | None, str | None]:
    """Returns (version of bubblewrap, None if missing; reason why it cannot sandbox programs, None if it can)."""
    bwrap = isolate.find_bwrap()
    if bwrap is None:
        return None, None
    version = "unknown"
    try:
        done = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=START_S)
        version = done.stdout.strip().removeprefix("bubblewrap ") or version
        check_isolation("bubblewrap")
    except (SandboxError, OSError, subprocess.TimeoutExpired) as error:
        return version, str(error)
    return version, None


def _cannot(isolation: Isolation, why: str) -> str:
    if isolation == "none":
        return f"cannot start a program: {why}"
    return (
        f"cannot sandbox untrusted programs: {why}. Install bubblewrap (the command bwrap, 0.8 or later) and allow it "
        "to create namespaces (in a container, by its runtime's options), or set reward.code.isolation: none, which "
        "runs the model's programs with all rights of this user"
    )


@contextmanager
def _started(program: str, limits: Limits, isolation: Isolation, ready_fd: int) -> Iterator[subprocess.Popen[bytes]]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mrl_code_"))
        source = Path(folder, "program.py")
        source.write_text(program, errors="surrogatepass")
        plan: dict[str, object] = {"uid": None, "tmp_options": None, "filter": None, "ready_fd": ready_fd}
        resources, command, python, inside = _resources(limits), [], isolate.PYTHON_OUTSIDE, str(source)
        if isolation == "bubblewrap":
            uid, bwrap, program_filter = isolate.own_uid(), isolate.find_bwrap(), filter_program()
            if bwrap is None:
                raise SandboxError(_cannot("bubblewrap", "bwrap is not on the PATH"))
            if program_filter is None:
                raise SandboxError(f"mrl has no system call filter for the processor {os.uname().machine}")
            resources["RLIMIT_NPROC"] = limits.processes + (uid is None)  # its namespace counts bwrap's own process
            tmp_options = f"nr_inodes={isolate.INODES_PER_MIB * limits.disk_mib + 64}"  # bubblewrap has no such option
            plan |= {"uid": uid, "tmp_options": tmp_options, "filter": program_filter.hex()}
            memory_mib = limits.processes * limits.memory_mib + limits.disk_mib
            joined = stack.enter_context(groups.group(memory_mib, limits.processes))
            command = [*joined, *isolate.bwrap_command(bwrap, source, limits.disk_mib, unprivileged=uid is None)]
            python, inside = isolate.python_inside(), "/program.py"
        plan |= {"limits": resources, "argv": [python, *PROGRAM_OPTIONS, inside]}
        process = subprocess.Popen(
            [*command, python, "-I", "-S", "-c", ENTER, json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=isolate.ENVIRONMENT,
            cwd=folder,
            pass_fds=[ready_fd],
            start_new_session=True,
        )
        stack.callback(_end, process)
        yield process


def _resources(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory_mib << 20,
        "RLIMIT_STACK": min(STACK_MIB, limits.memory_mib) << 20,
        "RLIMIT_CPU": math.ceil(limits.wall_s) + 1,  # for what the clock does not see; it is to be the first
        "RLIMIT_FSIZE": limits.disk_mib << 20,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_SIGPENDING": OPEN_FILES,
        "RLIMIT_MSGQUEUE": 0,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills bwrap, which ends everything inside; without bwrap the session, except processes that have left it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
