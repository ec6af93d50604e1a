"""Where the metrics of every step go besides metrics.jsonl; each is switched on by the key of its name in `run`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from mrl.config.schema import RunConfig
from mrl.core import StepStats
from mrl.observe.tensorboard import TensorboardWriter


class TrackerMissing(RuntimeError):
    """A tracker is switched on whose package is not installed."""


class Tracker(Protocol):
    """Made on rank 0 from the run directory, whose config.yaml is written by then. Called in one thread."""

    package: str  # of the class; has to be installed, and is imported by nothing but the tracker's own methods

    def __init__(self, run_dir: Path) -> None: ...

    def write(self, stats: StepStats) -> None:
        """The end of a step, whole or not at all. Raises OSError; what that means is checkpoint.on_error's to say."""

    def close(self) -> None:
        """The end of the run, a failed one too."""


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorboardWriter,
}


def wanted(run: RunConfig) -> list[str]:
    """Names of the trackers that are switched on. Raises TrackerMissing for one that cannot work here."""
    names = [name for name in TRACKERS if dict(run).get(name)]
    for name in names:
        package = TRACKERS[name].package
        if find_spec(package) is None:
            raise TrackerMissing(f"run.{name} needs the package {package}, which is not installed: install it, or "
                                 f"say run.{name}=false")  # fmt: skip
    return names
