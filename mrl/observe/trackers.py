"""Metric trackers of `run.trackers`, besides metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Protocol

from mrl.config.schema import AnyConfig, RunConfig
from mrl.core import StepStats
from mrl.observe.external_trackers import Mlflow, SwanLab, Trackio, Wandb
from mrl.observe.remote_tracker import Outcome, RemoteTracker, TrackerQueue
from mrl.observe.tensorboard import TensorboardWriter
from mrl.packages import pip_install, pip_install_extra


class TrackerMissing(RuntimeError):
    """A requested tracker's package is not installed."""


class Tracker(Protocol):
    """A tracker, made on rank 0 from the run's configuration and directory, and called in one thread."""

    package: ClassVar[str]  # must be installed; only the tracker's own methods import it

    def __init__(self, cfg: AnyConfig, run_dir: Path) -> None: ...

    def write(self, stats: StepStats) -> None:
        """Writes a step whole or not at all. Raises OSError, which checkpoint.on_error handles."""

    def close(self, outcome: Outcome) -> None:
        """Ends the run, also after a failure."""


# An external tracker, which may be down, is a RemoteTracker: a thread sends metrics to it during training.
TRACKERS: dict[str, type[Tracker] | type[RemoteTracker]] = {
    "tensorboard": TensorboardWriter,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "swanlab": SwanLab,
}

EXTRAS = {"wandb": "trackers", "mlflow": "trackers", "trackio": "trackio", "swanlab": "swanlab"}  # others: a package


def missing(run: RunConfig) -> Iterator[str]:
    """Yields, for each tracker that cannot work here, the reason and the remedy."""
    for name in run.trackers:
        package = TRACKERS[name].package
        if find_spec(package) is None:
            command = pip_install(package) if name not in EXTRAS else pip_install_extra(EXTRAS[name])
            yield (
                f"run.trackers: {name} needs the package {package}, which is not installed: {command}, or remove "
                f"{name} from run.trackers"
            )


def make(cfg: AnyConfig, run_dir: Path) -> dict[str, Tracker | TrackerQueue]:
    """Returns the trackers of a run by name. Raises TrackerMissing for one that cannot work here."""
    for problem in missing(cfg.run):
        raise TrackerMissing(problem)
    made: dict[str, Tracker | TrackerQueue] = {}
    for name in cfg.run.trackers:
        tracker = TRACKERS[name](cfg, run_dir)
        made[name] = TrackerQueue(name, tracker, run_dir) if isinstance(tracker, RemoteTracker) else tracker
    return made
