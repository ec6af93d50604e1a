"""Fails a unit test that starts a process.

Allowed are git, for the commit in a run's files, and a C compiler, if nothing has compiled mrl/kernels/native yet.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from importlib import metadata
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from mrl import platform
from tests.helpers.slow import RUN_SLOW

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system", "spawn")
ALLOWED = ("git", "cc", "gcc", "clang")
_is_on = False
if not RUN_SLOW:
    settings.register_profile("few", max_examples=25)
    settings.load_profile("few")


def _see(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_on and event in STARTS:
        program = arguments[0] if arguments else ""
        if not (isinstance(program, str) and Path(program).name in ALLOWED):
            pytest.fail(f"a unit test starts a process ({event} {arguments!s:.200}): such tests go to tests/system")


def _spawnv(path: str, arguments: list[str], files: list[int]) -> int:
    """Adds the audit event that multiprocessing omits when it starts a process."""
    sys.audit("spawn", path, arguments)
    return _real_spawnv(path, arguments, files)


_real_spawnv = util.spawnv_passfds
util.spawnv_passfds = _spawnv
sys.addaudithook(_see)


_cpu_gflops, _version = functools.cache(platform.cpu_gflops), functools.cache(metadata.version)


@pytest.fixture(scope="module", autouse=True)
def measured_once() -> Iterator[None]:
    """Caches the processor's speed and the packages' versions, which preflight reads in every `mrl train`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "cpu_gflops", _cpu_gflops)
        patch.setattr(metadata, "version", _version)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _is_on
    _is_on = item.path.is_relative_to(Path(__file__).parent)
    try:
        return (yield)
    finally:
        _is_on = False
