"""The command that installs what is missing here, into the Python that is running."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from importlib import metadata


def pip_install(*requirements: str) -> str:
    """Such as "/home/me/mrl/.venv/bin/python -m pip install 'nvidia-resiliency-ext<0.5,>=0.4.1'"."""
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def pip_install_extra(extra: str) -> str:
    """Of what one of mrl's extras (setup.py) asks for."""
    return pip_install(*(list(_of_extra(extra)) or [f"mrl[{extra}]"]))


def _of_extra(extra: str) -> Iterator[str]:
    try:
        lines = metadata.requires("mrl") or []
    except metadata.PackageNotFoundError:  # run from a checkout, without being installed
        return
    for line in lines:
        requirement, _, marker = line.partition(";")
        if marker.replace(" ", "").replace("'", '"') == f'extra=="{extra}"':
            yield requirement.strip()
