"""The recipes of docs/extending.md, applied literally to a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/extending.md"
STEP = re.compile(r"^`([^`]+)`, (?:new|after `([^`]+)`):\n\n```(?:python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section(heading: str) -> str:
    """Returns the text under "## heading"."""
    return PAGE.read_text().split(f"\n## {heading}\n")[1].partition("\n## ")[0]


class Recipe:
    """A copy of the package in `folder` with all steps of the recipe applied. new, changed: files that were added, and
    files that were edited

    A step is a file name and a block of Python: the content of a new file, or lines to insert after a given line.
    """

    def __init__(self, heading: str, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "mrl", folder / "mrl", ignore=shutil.ignore_patterns("__pycache__"))
        self.new: list[str] = []
        self.changed: list[str] = []
        for name, after, code in STEP.findall(section(heading)):
            self._take(folder / name, name, after, code)

    def _take(self, file: Path, name: str, after: str, code: str) -> None:
        if not after:
            assert not file.exists(), f"{name} is there already"
            file.write_text(code)
            self.new.append(name)
            return
        lines = file.read_text().splitlines(keepends=True)
        places = [number for number, line in enumerate(lines, 1) if line.rstrip("\n") == after]
        assert len(places) == 1, f"{name} has {len(places)} lines {after!r}"
        file.write_text("".join([*lines[: places[0]], code, *lines[places[0] :]]))
        self.changed += [name] if name not in self.changed else []

    def run(self, code: str, *arguments: object) -> str:
        """Runs `code` with this copy of the package and returns what it prints."""
        environment = {**os.environ, "PYTHONPATH": f"{self.folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout
