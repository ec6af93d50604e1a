"""Kernels in C are compiled once, and where they cannot be, torch's forms are used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl.kernels.native import build
from tests.unit.kernels.test_native_kernels import NO_FAULT, WITHOUT

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(any(words in WITHOUT for words in NO_FAULT), reason=WITHOUT)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def problem(home: Path, **environment: str) -> str:
    """What a new process says, whose cache is in `home`."""
    code = "from mrl.kernels import native; print(native.problem())"
    env = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_where_they_cannot_be_had_torch_s_forms_serve(tmp_path: Path) -> None:
    cache = Path(str(tmp_path) + build.CACHE.removeprefix("~"))
    assert problem(tmp_path, MRL_KERNELS="torch") == "MRL_KERNELS=torch" and not cache.exists()
    assert problem(tmp_path, CC="no-such-compiler") == "there is no C compiler (no-such-compiler)"
    assert problem(tmp_path, CC="false").startswith(f"{build.shutil.which('false')} failed:")
    assert list(cache.iterdir()) == [], "nothing is left of it"
    cache.chmod(0o777)
    assert problem(tmp_path) == f"{cache} belongs to another user, or other users may write to it"
    cache.rmdir()
    cache.touch()
    assert problem(tmp_path) == f"{cache} cannot be used: File exists"


def test_they_are_compiled_once_for_all_processes(tmp_path: Path) -> None:
    cache = Path(str(tmp_path) + build.CACHE.removeprefix("~"))
    assert problem(tmp_path) == "None"
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    assert problem(tmp_path) == "None" and file.stat().st_mtime_ns == before
    file.write_bytes(b"not a library")
    assert problem(tmp_path).startswith(f"{file} cannot be loaded (")
