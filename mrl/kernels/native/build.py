"""Shared library of the C sources beside this file, compiled once for this processor into the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE = "~/.cache/mrl/kernels"
TIMEOUT_S = 120.0
_HERE = Path(__file__).parent
_FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fopenmp-simd", "-funroll-loops"]
_FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]  # NaN and infinity keep their handling
_FOR_THIS_PROCESSOR = {"x86_64": "-march=native", "AMD64": "-march=native"}


class BuildError(Exception):
    """The library cannot be built or loaded; the message says why."""


def library() -> Path:
    """Returns the library file, compiled if needed. Raises BuildError."""
    flags = [*_FLAGS, _FOR_THIS_PROCESSOR.get(platform.machine(), "-mcpu=native")]
    sources = sorted(_HERE.glob("*.c"))
    said = [*flags, compiler(), _processor(), *(file.read_text() for file in (*sources, *sorted(_HERE.glob("*.h"))))]
    folder = Path(os.path.expanduser(CACHE))
    file = folder / f"{hashlib.sha256(chr(0).join(said).encode()).hexdigest()[:32]}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(folder)
        if not file.exists():
            _compile([compiler(), *flags, *map(str, sources), "-lm"], file)
    except OSError as error:
        raise BuildError(f"{folder} cannot be used: {error.strerror or error}") from error
    return file


def compiler() -> str:
    """Returns the compiler's path. Raises BuildError if there is none."""
    named = os.environ.get("CC")
    for name in [named] if named else ["cc", "gcc", "clang"]:
        if found := shutil.which(name):
            return found
    raise BuildError(f"there is no C compiler ({named or 'cc, gcc or clang'})")


def _processor() -> str:
    """Processor features, part of the cache key: machines may share a home directory."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _check_owner(folder: Path) -> None:
    """Raises BuildError if another account may write to the folder, as its files are executed."""
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise BuildError(f"{folder} belongs to another user, or other users may write to it")


def _compile(command: list[str], file: Path) -> None:
    """Compiles to a temporary file and renames it, so that concurrent processes do not conflict."""
    handle, name = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    os.close(handle)
    try:
        done = subprocess.run([*command, "-o", name], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-300:]}")
        os.replace(name, file)
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took longer than {TIMEOUT_S:g} s") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
