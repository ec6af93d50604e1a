"""A control group for each program, where one can be created: the kernel's own limit on its memory and processes.

Process limits do not cover everything that the kernel holds for processes (buffers of sockets and pipes, mappings, the
page cache, names of files that were looked up); a group's limits do. With version 1 the group is created inside this
process's own group. With version 2 a group that contains processes cannot have limited groups below it: the group is
created beside this process's own, if the owner of that place (systemd, a container) permits it.
"""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "mrl_code_"
STALE_S = 60.0  # an empty group as old as this was left by a killed trainer
REMOVE_S = 10.0  # for the kernel to remove the last process
OF_SANDBOX_MIB = 32  # bubblewrap, the interpreter's start, page tables
OF_SANDBOX_PROCESSES = 2  # bubblewrap's
JOIN = 'until [ "$1" = -- ]; do echo $$ >"$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'


@contextmanager
def group(memory_mib: int, processes: int) -> Iterator[list[str]]:
    """Yields the command prefix that runs a command within these limits; an empty list if no group can be created."""
    if problem() is not None:
        yield []
        return
    with _made(memory_mib + OF_SANDBOX_MIB, processes + OF_SANDBOX_PROCESSES) as folders:
        yield ["/bin/sh", "-c", JOIN, "sh", *map(str, folders), "--"]


@functools.cache
def problem() -> str | None:
    """Returns why no group can be created here; None if one can. Also removes leftovers of killed trainers."""
    try:
        for above in _parents():
            for old in above.glob(f"{PREFIX}*"):
                with suppress(OSError):  # in use, or gone
                    if time.time() - old.stat().st_mtime > STALE_S:
                        old.rmdir()
        with _made(OF_SANDBOX_MIB, OF_SANDBOX_PROCESSES) as folders:
            command = ["/bin/sh", "-c", JOIN, "sh", *map(str, folders), "--", "true"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=REMOVE_S)
        return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return str(error)


@contextmanager
def _made(memory_mib: int, processes: int) -> Iterator[list[Path]]:
    folders = [above / f"{PREFIX}{os.getpid()}_{secrets.token_hex(4)}" for above in _parents()]
    try:
        for folder in folders:
            folder.mkdir()
        memory = memory_mib << 20
        of_version_1 = {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes": memory}
        of_version_2 = {"memory.max": memory, "memory.swap.max": 0}
        limits = {**of_version_1, **of_version_2, "pids.max": processes}
        there = {name: folder / name for folder in folders for name in limits if (folder / name).exists()}
        for name, file in there.items():
            file.write_text(str(limits[name]))
        if "pids.max" not in there or there.keys().isdisjoint(("memory.limit_in_bytes", "memory.max")):
            raise OSError(f"{folders[0]} does not support limits of memory and processes")
        yield folders
    finally:
        for folder in folders:
            _remove(folder)


def _remove(folder: Path) -> None:
    end = time.monotonic() + REMOVE_S
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > end:
                return  # for `problem` to clear away
            time.sleep(0.002)


def _parents(proc: Path = Path("/proc/self")) -> list[Path]:
    """Returns the folders to create groups in: with version 1 one for memory and one for processes, with version 2 one
    for both. Raises ValueError if there are none.
    """
    mounts = _mounts((proc / "mountinfo").read_text())
    own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    of = {name: (names, path) for _, names, path in own for name in names.split(",")}
    if "memory" in of and "pids" in of:
        return list(dict.fromkeys(_folder(mounts, name, of[name][1]) for name in ("memory", "pids")))
    if "" not in of or "" not in mounts:
        raise ValueError("no control groups (cgroups) are mounted")
    here = _folder(mounts, "", of[""][1])
    for folder in (here, here.parent):
        with suppress(OSError):
            if {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
                return [folder]
    raise ValueError(f"neither {here} nor its parent delegates the memory and pids controllers to subgroups")


def _mounts(mountinfo: str) -> dict[str, tuple[str, str]]:
    """Returns (root, mount point) by controller; version 2 has the empty name."""
    found = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        for name in options.split(",") if kind == "cgroup" else [""] if kind == "cgroup2" else []:
            found[name] = (root, point)
    return found


def _folder(mounts: dict[str, tuple[str, str]], name: str, path: str) -> Path:
    if name not in mounts:
        raise ValueError(f"the control groups of {name} are not mounted")
    root, point = mounts[name]
    return Path(point, os.path.relpath(path, root)).resolve()
