"""C kernels are compiled once; without a compiler the torch forms are used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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


ANSWERS = """
import json, os, sys
from mrl.kernels import native
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        os.environ |= json.loads(line)
        print(native.problem(), flush=True)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        sys.exit("a copy has failed")
"""
Problem = Callable[..., str]


@pytest.fixture(scope="module")
def problem() -> Iterator[Problem]:
    """Returns `problem(home, **environment)`: the answer of a new process whose cache is in `home`. Each process is
    forked from one that has imported the kernels' module and compiled none."""
    env, pipe = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.PIPE
    command = [sys.executable, "-W", "ignore", "-c", ANSWERS]
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        to, back = process.stdin, process.stdout

        def ask(home: Path, **environment: str) -> str:
            late = threading.Timer(300, process.kill)
            late.start()
            print(json.dumps({"HOME": str(home), **environment}), file=to, flush=True)
            answer = back.readline().strip()
            late.cancel()
            assert answer, "the process has ended, or gave no answer in 300 s"
            return answer

        yield ask
        to.close()
        assert process.wait(60) == 0


def test_where_they_cannot_be_had_torch_s_forms_serve(problem: Problem, tmp_path: Path) -> None:
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


def test_they_are_compiled_once_for_all_processes(problem: Problem, tmp_path: Path) -> None:
    cache = Path(str(tmp_path) + build.CACHE.removeprefix("~"))
    assert problem(tmp_path) == "None"
    (file,) = cache.iterdir()
    before = file.stat().st_mtime_ns
    assert problem(tmp_path) == "None" and file.stat().st_mtime_ns == before
    file.write_bytes(b"not a library")
    assert problem(tmp_path).startswith(f"{file} cannot be loaded (")
