"""Where the metrics of every step go besides metrics.jsonl: what `run.trackers` names."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Protocol

from mrl.config.schema import AnyConfig, RunConfig
from mrl.core import StepStats
from mrl.observe.mlflow_tracker import Mlflow
from mrl.observe.sender import Outcome, Remote, Sender
from mrl.observe.tensorboard import TensorboardWriter
from mrl.observe.wandb_tracker import Wandb
from mrl.packages import pip_install, pip_install_extra


class TrackerMissing(RuntimeError):
    """A tracker is asked for whose package is not installed."""


class Tracker(Protocol):
    """Made on rank 0 from the run's configuration and its directory. Called in one thread."""

    package: ClassVar[str]  # has to be installed, and is imported by nothing but the tracker's own methods

    def __init__(self, cfg: AnyConfig, run_dir: Path) -> None: ...

    def write(self, stats: StepStats) -> None:
        """The end of a step, whole or not at all. Raises OSError; what that means is checkpoint.on_error's to say."""

    def close(self, outcome: Outcome) -> None:
        """The end of the run, a failed one too."""


# One that others run, or that may be down, is a Remote: metrics are sent to it beside the training.
TRACKERS: dict[str, type[Tracker] | type[Remote]] = {
    "tensorboard": TensorboardWriter,
    "wandb": Wandb,
    "mlflow": Mlflow,
}


def missing(run: RunConfig) -> Iterator[str]:
    """Of each tracker that cannot work here: why, and what to do."""
    for name in run.trackers:
        package = TRACKERS[name].package
        if find_spec(package) is None:
            command = pip_install(package) if name == "tensorboard" else pip_install_extra("trackers")
            yield (
                f"run.trackers: {name} needs the package {package}, which is not installed: {command}, or leave {name} "
                "out"
            )


def make(cfg: AnyConfig, run_dir: Path) -> dict[str, Tracker | Sender]:
    """The trackers of a run, by name. Raises TrackerMissing for one that cannot work here."""
    for problem in missing(cfg.run):
        raise TrackerMissing(problem)
    return {name: _made(TRACKERS[name], name, cfg, run_dir) for name in cfg.run.trackers}


def _made(kind: type[Tracker] | type[Remote], name: str, cfg: AnyConfig, run_dir: Path) -> Tracker | Sender:
    if issubclass(kind, Remote):
        return Sender(name, kind(cfg, run_dir), run_dir)
    return kind(cfg, run_dir)
