"""Versions that are tested together on CPUs: those of constraints.txt, for packages that decide a run's results."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from mrl.packages import pip_install, versions
from mrl.preflight.finding import Finding

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# Python's version -> the versions that ran with it: CI runs 3.11, `make test-stack` both
STACKS = {
    "3.11": {"torch": "2.13.0", "megatron-core": "0.16.1", "transformers": "5.19.0"},
    "3.12": {"torch": "2.13.0", "megatron-core": "0.19.2", "transformers": "5.19.0"},
}
TESTED = {
    **STACKS.get(PYTHON, STACKS["3.12"]),
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "numpy": "2.4.6",
    "pydantic": "2.14.3",
    "datasets": "5.2.0",
    "sglang": "0.5.23",
    "sglang-router": "0.3.2",
    "nvidia-resiliency-ext": "0.4.1",
}


def untested_combination() -> str | None:
    """Returns the installed versions in one line, with those that were tested together, if they differ."""
    here = versions(*STACKS["3.12"])
    if STACKS.get(PYTHON) == {part: Version(found).public for part, found in here.items()}:
        return None
    tested = "; ".join(_stack(python, parts) for python, parts in STACKS.items())
    return f"untested combination: {_stack(PYTHON, here)}. Tested: {tested}"


def _stack(python: str, parts: Mapping[str, str]) -> str:
    return f"Python {python} with {', '.join(f'{part} {version}' for part, version in parts.items())}"


def check_versions() -> Iterator[Finding]:
    """Yields a problem for a version that mrl does not support, and a warning for a supported one that is not
    tested."""
    asked, good = _asked(), []
    for part, tested in TESTED.items():
        try:
            found = metadata.version(part)
        except metadata.PackageNotFoundError:
            if part in asked and "extra" not in str(asked[part].marker):
                yield Finding("versions", "problem", f"{part} is not installed", pip_install(f"{part}=={tested}"))
            continue
        wanted = asked.get(part)
        if wanted is not None and not wanted.specifier.contains(Version(found).base_version, prereleases=True):
            text = f"{part} {found} is installed, and mrl needs {wanted.specifier}"
            yield Finding("versions", "problem", text, pip_install(f"{part}=={tested}"))
        elif Version(found).public != tested:
            yield Finding("versions", "warning", f"{part} {found} is installed; {tested} is the tested version")
        else:
            good.append(f"{part} {found}")
    if good:
        yield Finding("versions", "ok", f"tested versions (on CPUs): {', '.join(good)}")


def _asked() -> dict[str, Requirement]:
    """Requirements of the installed package by name; empty if mrl is not installed as a package."""
    try:
        lines = metadata.requires("mrl") or []
    except metadata.PackageNotFoundError:
        return {}
    asked = [Requirement(line) for line in lines]
    return {each.name: each for each in asked if each.specifier and _is_for_this_python(each)}


def _is_for_this_python(requirement: Requirement) -> bool:
    if requirement.marker is None:
        return True
    extra = re.search(r'extra == "([^"]+)"', str(requirement.marker))
    return requirement.marker.evaluate({"extra": extra[1] if extra else ""})
