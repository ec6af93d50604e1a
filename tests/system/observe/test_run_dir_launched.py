"""A launched run whose directory a rank removes, and whose terminal output ends within a line."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from mrl.launcher import launch


def test_a_run_directory_that_is_removed_meanwhile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import shutil, sys; shutil.rmtree('run'); sys.exit(3)"
    with contextlib.chdir(tmp_path):
        assert launch([sys.executable, "-c", code], 1, Path("run/logs")) == 3
    assert "rank 0 failed first (exit code 3)" in capfd.readouterr().err


def test_what_a_rank_had_begun_to_say_does_not_run_into_the_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import sys; sys.stdout.write('half a li'); sys.stdout.flush(); sys.exit(3)"
    with contextlib.chdir(tmp_path):
        assert launch([sys.executable, "-c", code], 1, Path("run/logs")) == 3
    shown = capfd.readouterr()
    assert shown.out == "half a li" and shown.err.startswith("\nmrl: error: rank 0 failed")
