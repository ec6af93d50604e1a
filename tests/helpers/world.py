"""Runs a script of tests/worlds on several ranks and returns what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers import zygote

ROOT = Path(__file__).parents[2]
WORLDS = ROOT / "tests" / "worlds"


def start_world(processes: int, script: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """Starts tests/worlds/SCRIPT on `processes` gloo ranks with one thread each."""
    return zygote.start(
        [sys.executable, "-m", "tests.worlds.forked", str(processes), str(WORLDS / script), *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_world(processes: int, script: str, *arguments: str | Path, timeout_s: float = 900) -> str:
    """Runs a script on `processes` ranks and returns what they print. Fails the test if a rank fails."""
    with start_world(processes, script, *arguments) as world:
        try:
            output, errors = world.communicate(timeout=timeout_s)
        finally:
            world.kill()  # its ranks end with it
    assert world.returncode == 0, output[-2000:] + errors[-6000:]
    return output
