"""The commands of docs/testing.md: four processes with a tiny model, by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_commands_that_debug_four_processes(tmp_path: Path) -> None:
    [commands] = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/testing.md").read_text(), re.DOTALL)
    commands = commands.replace("/tmp/", f"{tmp_path}/").replace(".venv/bin/python", sys.executable)
    subprocess.run(["bash", "-euc", commands], cwd=ROOT, check=True, timeout=600)
    found = json.loads((tmp_path / "four.json").read_text())
    assert set(found) == {"tp2.pp2", "cp2"}
    assert max(max(errors[:2]) for layout in found.values() for errors in layout.values()) < 1e-5
