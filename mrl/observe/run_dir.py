"""Run directory: ROOT/NAME/{config.yaml, metrics.jsonl, rollouts/, checkpoints/, logs/, lock}."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from mrl.config.loader import dump_resolved
from mrl.config.schema import AnyConfig
from mrl.files import make_private, write_atomically
from mrl.observe.lock import Lock, Owner, read_owner
from mrl.resilience.protocol import MARKER

LAUNCH = "launch"  # the launcher (torchrun or ft_launcher) whose ranks write to the directory
# of the directory, not of what a run has made
KEEP = ("inputs", "logs", "checkpoints", "engines", "lock", "ft.yaml", MARKER, LAUNCH)


class RunExists(RuntimeError):
    """The directory holds another run's files and no checkpoint to resume from."""


class RunDir:
    """An owned run directory; as a context manager it releases the ownership. A new one has mode 0700."""

    def __init__(self, path: Path) -> None:
        make_private(path)
        for folder in ("logs", "rollouts", "checkpoints"):
            (path / folder).mkdir(exist_ok=True)
        self.path = path
        self._lock = Lock(path / "lock")

    @classmethod
    def open(cls, cfg: AnyConfig, check: Callable[[], None] | None = None) -> RunDir:
        """Creates or reopens ROOT/NAME and saves the resolved configuration in it, without its passwords.

        check: inspects the directory before anything changes; if it raises, the directory stays as it was

        Raises RunLocked if another live process owns it.
        """
        run_dir = cls(Path(cfg.run.root) / cfg.run.name)
        try:
            if check is not None:
                check()
        except BaseException:
            run_dir.close()
            raise
        write_atomically(run_dir.path / "config.yaml", dump_resolved(cfg))
        return run_dir

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def record_launch(run_dir: Path) -> None:
    """Records this process's launcher as the origin of the run directory's files."""
    Owner.of(os.getppid()).write(run_dir / LAUNCH)


def is_of_this_launch(run_dir: Path) -> bool:
    """True if earlier ranks of this process's launcher wrote to the run directory."""
    return read_owner(run_dir / LAUNCH) == Owner.of(os.getppid())


def refuse_existing(cfg: AnyConfig) -> None:
    """Raises RunExists if a run without a checkpoint has written to the directory.

    run.existing: move_aside permits it, and so does a run that was told to stop in order to be restarted.
    """
    run_dir = Path(cfg.run.root) / cfg.run.name
    if cfg.run.existing == "move_aside" or (run_dir / MARKER).exists():
        return
    if not any(run_dir.glob("checkpoints/step_*/complete")) and written_files(run_dir):
        raise RunExists(
            f"{run_dir} has metrics, samples or weights of a run, but no checkpoint to resume from: choose another "
            "run.name, or set run.existing=move_aside (moves them to its subdirectory earlier_N)"
        )


def written_files(run_dir: Path) -> Sequence[Path]:
    """Returns the files of a run that has got as far as metrics, samples or weights; else an empty list."""
    names = ("*.jsonl", "rollouts/*.jsonl", "hf*")
    if not any(path.is_dir() or path.stat().st_size for name in names for path in run_dir.glob(name)):
        return []
    return [path for path in run_dir.iterdir() if path.name not in KEEP and not path.name.startswith("earlier_")]


def move_aside(run_dir: Path) -> Path:
    """Moves a run's files to RUN_DIR/earlier_N, which `mrl report` can read; returns that directory."""
    earlier = [int(path.name[8:]) for path in run_dir.glob("earlier_*") if path.name[8:].isdigit()]
    aside = run_dir / f"earlier_{max(earlier, default=0) + 1}"
    aside.mkdir()
    for path in written_files(run_dir):
        path.rename(aside / path.name)
    (run_dir / "rollouts").mkdir()
    return aside
