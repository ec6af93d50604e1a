"""What lies on disk: RUN_DIR/checkpoints/step_N, whole or under a name that nobody reads.

A checkpoint is written as step_N.tmp and renamed when it is whole. Its last file is `complete`: a manifest with the
size of every other file, by which a truncated one is found before anything is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

MARKER = "complete"
STATE = "state.json"
VERSION = 1

_NAME = re.compile(r"step_(\d+)")


def root(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def latest(run_dir: Path) -> Path | None:
    """The complete checkpoint with the most steps, or None."""
    found = complete_checkpoints(root(run_dir))
    return found[-1] if found else None


def complete_checkpoints(directory: Path) -> list[Path]:
    """By step, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / MARKER).is_file()]
    return sorted(found, key=_step)


def begin(tmp: Path) -> None:
    """Makes an empty `tmp`, after taking away what broken-off saves and removals have left beside it."""
    tmp.parent.mkdir(parents=True, exist_ok=True)
    for leftover in tmp.parent.glob("step_*.tmp"):
        shutil.rmtree(leftover)
    tmp.mkdir()


def finish(tmp: Path, final: Path, learners: dict[str, Any], state: dict[str, Any]) -> None:
    """Writes `state` and the manifest, makes everything durable and gives `tmp` its final name."""
    write_json(tmp / STATE, state)
    files = {str(path.relative_to(tmp)): path.stat().st_size for path in sorted(tmp.rglob("*")) if path.is_file()}
    for directory in [*(path for path in tmp.rglob("*") if path.is_dir()), tmp]:
        _sync(directory)
    write_json(tmp / MARKER, {"version": VERSION, "step": _step(final), "learners": learners, "files": files})
    if final.exists():  # the same step once more, or something without a marker
        remove(final)
    os.rename(tmp, final)
    _sync(final.parent)


def prune(directory: Path, keep_last: int, newest: Path) -> None:
    """Removes complete checkpoints but the last `keep_last`; never `newest`."""
    for path in complete_checkpoints(directory)[:-keep_last]:
        if path != newest:
            remove(path)


def remove(path: Path) -> None:
    """Takes the name away first, so that a removal broken off half-way leaves nothing that looks complete."""
    doomed = path.with_name(f"{path.name}.removed.tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(manifest, state). Raises ValueError if the checkpoint is not complete, or a file is missing or too short."""
    marker = path / MARKER
    if not marker.is_file():
        raise ValueError(f"{path} is not a complete checkpoint: it has no file {MARKER!r}")
    manifest = json.loads(marker.read_text())
    if manifest["version"] != VERSION:
        raise ValueError(f"{path} has format {manifest['version']}; this version of mrl reads format {VERSION}")
    wrong = [problem for name, size in manifest["files"].items() if (problem := _problem(path / name, size))]
    if wrong:
        raise ValueError(f"{path} is damaged: {'; '.join(wrong)}; remove it to go on from an older one")
    return manifest, json.loads((path / STATE).read_text())


def write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=1)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(partial, path)
    _sync(path.parent)


def _problem(path: Path, size: int) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing in {path.parent}"
    found = path.stat().st_size
    return None if found == size else f"{path} has {found} bytes, {size} were written"


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
