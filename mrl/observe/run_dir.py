"""The run directory: ROOT/NAME/{config.yaml, metrics.jsonl, rollouts/, checkpoints/, logs/, lock}."""

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

LAUNCH = "launch"  # torchrun or ft_launcher, whose ranks have begun to write there
# of the directory, not of what a run has made
KEEP = ("logs", "checkpoints", "engines", "lock", "ft.yaml", MARKER, LAUNCH)


class RunExists(RuntimeError):
    """The directory holds what another run has written, and no checkpoint from which this one could go on."""


class RunDir:
    """An owned run directory; a context manager that gives the ownership back. One that is made is its owner's alone
    (mode 0700)."""

    def __init__(self, path: Path) -> None:
        make_private(path)
        for folder in ("logs", "rollouts", "checkpoints"):
            (path / folder).mkdir(exist_ok=True)
        self.path = path
        self._lock = Lock(path / "lock")

    @classmethod
    def open(cls, cfg: AnyConfig, check: Callable[[], None] | None = None) -> RunDir:
        """Creates or reopens ROOT/NAME and saves the resolved configuration in it, without its passwords.

        check: looks at what is there before anything is changed; raises to give the directory back as it was

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


def note_launch(run_dir: Path) -> None:
    """What is there from now on is of the launcher that has started this process."""
    Owner.of(os.getppid()).write(run_dir / LAUNCH)


def is_of_this_launch(run_dir: Path) -> bool:
    """Whether the launcher that has started this process has had ranks before that wrote there."""
    return read_owner(run_dir / LAUNCH) == Owner.of(os.getppid())


def refuse_existing(cfg: AnyConfig) -> None:
    """Raises RunExists if a run without a checkpoint has written there, and neither run.existing moves that aside nor
    that run was told to stop, to be started again."""
    run_dir = Path(cfg.run.root) / cfg.run.name
    if cfg.run.existing == "move_aside" or (run_dir / MARKER).exists():
        return
    if not any(run_dir.glob("checkpoints/step_*/complete")) and written(run_dir):
        raise RunExists(
            f"{run_dir} holds metrics, samples or weights of a run that left no checkpoint to go on from: choose "
            "another run.name, or say run.existing=move_aside (they go to earlier_N in it)"
        )


def written(run_dir: Path) -> Sequence[Path]:
    """What a run has made there, if it has come as far as metrics, samples or weights."""
    names = ("*.jsonl", "rollouts/*.jsonl", "hf*")
    if not any(path.is_dir() or path.stat().st_size for name in names for path in run_dir.glob(name)):
        return []
    return [path for path in run_dir.iterdir() if path.name not in KEEP and not path.name.startswith("earlier_")]


def move_aside(run_dir: Path) -> Path:
    """To RUN_DIR/earlier_N, which is what the run directory was: `mrl report` reads it."""
    earlier = [int(path.name[8:]) for path in run_dir.glob("earlier_*") if path.name[8:].isdigit()]
    aside = run_dir / f"earlier_{max(earlier, default=0) + 1}"
    aside.mkdir()
    for path in written(run_dir):
        path.rename(aside / path.name)
    (run_dir / "rollouts").mkdir()
    return aside
