"""Disk layout of checkpoints: RUN_DIR/checkpoints/step_N, visible under that name only when complete.

A checkpoint is written as step_N.tmp and renamed when complete. Its last file is `complete`: a manifest with the size
of every other file, which detects a truncated one before anything is loaded. Readers of a checkpoint hold a shared lock
on that file, and removal requires the exclusive lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.directories import MANIFEST, Damaged, read_manifest, write_manifest
from mrl.files import lock, lock_for_reading, rename_durably, write_atomically
from mrl.foreign import read_json

STATE = "state.json"
RANDOM = "random"  # folder of each rank's random state
BEST = "best"  # beside the checkpoints: a link to one of them
SAMPLES = "kept.pt"  # state that only rank 0 keeps, if any
VERSION = 2

_NAME = re.compile(r"step_(\d+)")


def root(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def latest(run_dir: Path) -> Path | None:
    """Returns the complete checkpoint with the most steps, or None."""
    found = complete_checkpoints(root(run_dir))
    return found[-1] if found else None


def complete_checkpoints(directory: Path) -> list[Path]:
    """Returns the complete checkpoints by step, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and (path / MANIFEST).is_file()]
    return sorted(found, key=step_number)


def step_number(path: Path) -> int:
    """Returns N of .../step_N. Raises ValueError for another name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named step_N")
    return int(match[1])


def begin(tmp: Path) -> None:
    """Creates an empty `tmp`, after deleting the leftovers of interrupted saves and removals beside it."""
    tmp.parent.mkdir(parents=True, exist_ok=True)
    for leftover in tmp.parent.glob("step_*.tmp"):
        shutil.rmtree(leftover)
    (tmp / RANDOM).mkdir(parents=True)


def finish(tmp: Path, final: Path, learners: dict[str, Any], state: dict[str, Any]) -> None:
    """Writes `state` and the manifest, syncs everything to disk and renames `tmp` to `final`.

    Raises ValueError if `final` exists and is being read.
    """
    write_atomically(tmp / STATE, json.dumps(state, indent=1))
    write_manifest(tmp, {"version": VERSION, "step": step_number(final), "learners": learners})
    if final.exists() and not remove(final):  # the same step saved again, or an incomplete directory
        raise ValueError(f"{final} exists already, and another process is reading it: wait until it ends")
    rename_durably(tmp, final)


def prune(directory: Path, keep_last: int, keep_every_steps: int | None, newest: Path, best: int | None = None) -> None:
    """Removes complete checkpoints except the last `keep_last`, multiples of `keep_every_steps`, `newest`, and the
    best.

    The best is that of `best` steps or its substitute (`best_of`). A checkpoint that is being read stays until a later
    call.
    """
    stays = (newest, best_of(directory / f"step_{best}") if best is not None else None)
    for path in complete_checkpoints(directory)[:-keep_last]:
        lasting = keep_every_steps is not None and step_number(path) % keep_every_steps == 0
        if path not in stays and not lasting:
            remove(path)


def link_best(run_dir: Path, step: int) -> None:
    """Points the link RUN_DIR/checkpoints/best to the checkpoint of `step` steps, atomically."""
    link = root(run_dir) / BEST
    temporary = link.with_name(f"{BEST}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(f"step_{step}")
    os.replace(temporary, link)


def best_of(path: Path) -> Path | None:
    """Returns the checkpoint to keep as the best one, or None.

    That is `path`, RUN_DIR/checkpoints/step_N; if it could not be written, the previous best, which BEST links to.
    """
    named = (path.parent / BEST).resolve().name
    found = [each for each in complete_checkpoints(path.parent) if each.name in (path.name, named)]
    return path if path in found else found[0] if found else None


def step_path(run_dir: Path, step: int) -> Path:
    """Returns the path of the checkpoint of `step` steps, which may not exist."""
    return root(run_dir) / f"step_{step}"


def remove(path: Path) -> bool:
    """Deletes the checkpoint; returns False, and does nothing, if it is being read.

    Renames it first, so that an interrupted removal leaves nothing that looks complete.
    """
    doomed = path.with_name(f"{path.name}.removed.tmp")
    with contextlib.ExitStack() as stack:
        if (path / MANIFEST).is_file():
            marker = stack.enter_context((path / MANIFEST).open("r+b"))
            if not lock(marker):
                return False
        os.rename(path, doomed)
    shutil.rmtree(doomed)
    return True


@contextlib.contextmanager
def hold_for_reading(path: Path) -> Iterator[None]:
    """Prevents all processes of this machine from removing the checkpoint. Raises Damaged if it is not complete."""
    try:
        marker = (path / MANIFEST).open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise _incomplete(path) from None
    with marker:
        lock_for_reading(marker)
        if not _is_still(path / MANIFEST, marker.fileno()):
            raise Damaged(f"{path} was removed while it was being opened")
        yield


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (manifest, state).

    Raises Damaged if the checkpoint is not complete, or a file is missing or too short.
    """
    if not (path / MANIFEST).is_file():
        raise _incomplete(path)
    manifest = read_manifest(path, remedy="remove it to resume from an older one", version=VERSION)
    if not isinstance(manifest.get("learners"), dict):
        raise Damaged(f"{path / MANIFEST} does not list the checkpoint's models")
    state = read_json(path / STATE)
    if not isinstance(state, dict):
        raise Damaged(f"{path / STATE} does not contain the state of a run")
    return manifest, state


def _incomplete(path: Path) -> Damaged:
    return Damaged(f"{path} is not a complete checkpoint: it lacks the file {MANIFEST!r}")


def _is_still(path: Path, descriptor: int) -> bool:
    """Returns True if the open file is still the one at `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
