"""Commands that install missing packages into the running Python."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

CHECKOUT = Path(__file__).parents[1]


def pip_install(*requirements: str) -> str:
    """Returns a command such as "/home/me/mrl/.venv/bin/python -m pip install 'nvidia-resiliency-ext<0.5,>=0.4.1'"."""
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def pip_install_extra(extra: str) -> str:
    """Returns the command that installs the requirements of one of mrl's extras (setup.py)."""
    requirements = list(_of_extra(extra))
    if requirements:
        return pip_install(*requirements)
    return pip_install("--editable", f"{CHECKOUT}[{extra}]")  # the installed metadata is older than the extra


def missing_of_extra(extra: str) -> list[str]:
    """Returns the names of an extra's requirements that are not installed."""
    return [name for name in map(_name, _of_extra(extra)) if not _is_installed(name)]


def _name(requirement: str) -> str:
    return re.split(r"[\s<>=!~\[;(]", requirement, maxsplit=1)[0]


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _of_extra(extra: str) -> Iterator[str]:
    try:
        lines = metadata.requires("mrl") or []
    except metadata.PackageNotFoundError:  # run from a checkout, without being installed
        return
    for line in lines:
        marker = Requirement(line).marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            yield line.partition(";")[0].strip()


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    return {name: metadata.version(name) for name in packages if _is_installed(name)}


def commit(checkout: Path = CHECKOUT) -> str | None:
    """Returns the commit of mrl's checkout, or another, with a + if files differ from it; None without a checkout."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
