"""Runs code in a separate Python process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(code: str, *, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *([str(path)] if path else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
