"""The run directory: ROOT/NAME/{config.yaml, metrics.jsonl, rollouts/, checkpoints/, logs/, lock}."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from mrl.config.loader import dump_resolved
from mrl.config.schema import Config
from mrl.observe.files import write_atomically
from mrl.observe.lock import Lock


class RunDir:
    """An owned run directory; a context manager that gives the ownership back."""

    def __init__(self, path: Path) -> None:
        for folder in ("logs", "rollouts", "checkpoints"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = Lock(path / "lock")

    @classmethod
    def open(cls, cfg: Config, check: Callable[[], None] | None = None) -> RunDir:
        """Creates or reopens ROOT/NAME and saves the resolved configuration in it.

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
