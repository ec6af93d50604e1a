"""Versions that CI tests together on CPUs: those of constraints.txt, for packages that decide a run's results."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from mrl.packages import pip_install
from mrl.preflight.finding import Finding

TESTED = {
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "transformers": "5.19.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "numpy": "2.4.6",
    "pydantic": "2.14.3",
    "datasets": "5.2.0",
    "sglang": "0.5.23",
    "sglang-router": "0.3.2",
    "nvidia-resiliency-ext": "0.4.1",
}


def check_versions() -> Iterator[Finding]:
    """Yields a problem for a version that mrl does not support, and a warning for a supported one that is not
    tested."""
    asked, good = _asked(), []
    for part, tested in TESTED.items():
        try:
            found = metadata.version(part)
        except metadata.PackageNotFoundError:
            if part in asked and asked[part].marker is None:
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
    return {requirement.name: requirement for requirement in asked if requirement.specifier}
