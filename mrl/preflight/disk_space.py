"""Checks that the run directory can be created and that the disk has space for the run's files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mrl.config.checkpoint_size import checkpoint_bytes, disk_use
from mrl.config.schema import AnyConfig, Config
from mrl.directories import size_text
from mrl.families import load_arch
from mrl.files import NoLocks, lock
from mrl.observe import RunExists, refuse_existing
from mrl.preflight.finding import Finding


def check_directory(cfg: AnyConfig) -> Iterator[Finding]:
    """Creates, locks and removes a file in the run directory, or in its first existing parent."""
    run_dir = Path(cfg.run.root).absolute() / cfg.run.name
    there = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            lock(file)
    except NoLocks as error:
        yield Finding("run directory", "problem", f"run.root: {error}")
        return
    except OSError as error:
        text = f"run.root: no file can be created in {there}: {error.strerror}"
        yield Finding("run directory", "problem", text, "choose another run.root, or correct that directory")
        return
    if not (run_dir / "lock").exists():  # otherwise rank 0 checks, since it knows whether that run is active
        try:
            refuse_existing(cfg)
        except RunExists as error:
            yield Finding("run directory", "problem", str(error))
            return
    yield Finding("run directory", "ok", str(run_dir))


def check_space(cfg: Config) -> Iterator[Finding]:
    """Checks the disk for checkpoints and exports, which are by far the largest files of a run."""
    archs = {name: load_arch(use.path or cfg.model.path) for name, use in cfg.models().items()}
    use = disk_use(cfg, archs)
    if not use.turning + use.staying:
        yield Finding("disk", "skipped", "neither checkpoints nor weights are written")
        return
    run_dir = Path(cfg.run.root).absolute() / cfg.run.name
    there = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    # the checkpoints of an earlier start, which the next ones replace
    have = sum(file.stat().st_size for file in run_dir.glob("checkpoints/step_*/**/*") if file.is_file())
    parts = []
    if cfg.checkpoint.every_steps is not None:
        parts.append(f"a checkpoint is {size_text(checkpoint_bytes(cfg, archs))}")
    parts.append(f"at most {size_text(use.turning)} are replaced over time, {size_text(use.staying)} are kept")
    text = f"{', '.join(parts)}; {size_text(free)} free on the disk of {there}"
    remedy = "lower checkpoint.keep_last, raise checkpoint.every_steps, or choose a run.root with more space"
    if free + have < use.turning:
        yield Finding("disk", "problem", f"checkpoint: {text}", remedy)
    elif free + have < use.turning + use.staying:
        yield Finding("disk", "warning", f"checkpoint: the disk fills up before the run ends: {text}", remedy)
    else:
        yield Finding("disk", "ok", text)
