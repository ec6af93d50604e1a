"""The command that installs what is missing here, into the Python that is running."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def pip_install(*requirements: str) -> str:
    """Such as "/home/me/mrl/.venv/bin/python -m pip install 'nvidia-resiliency-ext<0.5,>=0.4.1'"."""
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def pip_install_extra(extra: str) -> str:
    """Of what one of mrl's extras (setup.py) asks for."""
    requirements = list(_of_extra(extra))
    if requirements:
        return pip_install(*requirements)
    return pip_install("--editable", f"{CHECKOUT}[{extra}]")  # its metadata are older than the extra


def missing_of_extra(extra: str) -> list[str]:
    """What it asks for and is not installed, by name."""
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
        requirement, _, marker = line.partition(";")
        if marker.replace(" ", "").replace("'", '"') == f'extra=="{extra}"':
            yield requirement.strip()


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    return {name: metadata.version(name) for name in packages if _is_installed(name)}


def commit(checkout: Path = CHECKOUT) -> str | None:
    """Of the checkout that mrl runs from, or another, with a + where files differ from it; None if it is not one."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
