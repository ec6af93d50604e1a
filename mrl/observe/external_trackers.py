"""Trackers of `run.trackers` with a library of their own: Weights & Biases, SwanLab, trackio and MLflow.

API keys, users and passwords come from the environment, or from the library's login. What Weights & Biases and SwanLab
write offline is sent later by `wandb sync` and `swanlab sync`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from mrl.config.loader import dump_tree
from mrl.observe.remote_tracker import Outcome, RemoteTracker, TrackedStep

WANDB_INIT_S = 60.0
SWANLAB_STATES: dict[Outcome, Literal["success", "aborted", "crashed"]] = {
    "finished": "success",
    "stopped": "aborted",
    "failed": "crashed",
}
METRICS_A_CALL, PARAMS_A_CALL, PARAM_CHARS = 1000, 100, 500  # limits of an MLflow server
MLFLOW_ENVIRONMENT = {  # defaults; MLflow fails at once, since the sender retries by itself
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Wandb(RemoteTracker):
    """Weights & Biases run whose curves are drawn over a metric of its own, `step`.

    wandb rejects a step that it has seen, and a run resumed from a checkpoint repeats some.
    """

    package: ClassVar[str] = "wandb"

    def open(self, run_id: str | None) -> str:
        import wandb

        wanted, made = self._cfg.run.wandb, run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=wanted.project,
            entity=wanted.entity,
            name=wanted.name or self._cfg.run.name,
            group=wanted.group,
            tags=list(wanted.tags),
            mode=wanted.mode,
            id=made,
            resume="allow",
            dir=str(self._run_dir.absolute()),
            config=dump_tree(self._cfg),
            settings=wandb.Settings(console="off", silent=True, init_timeout=WANDB_INIT_S),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return made

    def where(self) -> str:
        if self._cfg.run.wandb.mode == "online":
            return str(self._run.url)
        return f"offline, {Path(self._run.dir).parent} (upload it with wandb sync)"

    def send(self, rows: Sequence[TrackedStep]) -> None:
        for row in rows:
            self._run.log({"step": row.step, **row.metrics})

    def close(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


class SwanLab(RemoteTracker):
    package: ClassVar[str] = "swanlab"

    def open(self, run_id: str | None) -> str:
        import swanlab

        wanted, made = self._cfg.run.swanlab, run_id or secrets.token_hex(8)
        folder = self._run_dir.absolute() / "swanlab"
        folder.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=wanted.project,
            workspace=wanted.workspace,
            name=wanted.name or self._cfg.run.name,
            group=wanted.group,
            tags=list(wanted.tags),
            mode=wanted.mode,
            id=made,
            resume="allow",
            log_dir=str(folder),
            config=dump_tree(self._cfg),
            settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
        )
        return made

    def where(self) -> str:
        if self._cfg.run.swanlab.mode == "online":
            return str(self._run.url)
        return f"offline, {self._run.dir} (upload it with swanlab sync)"

    def send(self, rows: Sequence[TrackedStep]) -> None:
        for row in rows:
            self._run.log(row.metrics, step=row.step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish(state=SWANLAB_STATES[outcome], error="the run failed" if outcome == "failed" else None)


class Trackio(RemoteTracker):
    """trackio run, in a local database (TRACKIO_DIR) or in a Space of the Hugging Face hub.

    trackio resumes runs by name, so the name is unique and is the run's id.
    """

    package: ClassVar[str] = "trackio"

    def open(self, run_id: str | None) -> str:
        import trackio

        wanted = self._cfg.run.trackio
        made = run_id or f"{wanted.name or self._cfg.run.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=wanted.project,
            name=made,
            group=wanted.group,
            space_id=wanted.space,
            private=True if wanted.space is not None else None,
            resume="allow",
            config=dump_tree(self._cfg),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return made

    def where(self) -> str:
        wanted = self._cfg.run.trackio
        if wanted.space is not None:
            return f"https://huggingface.co/spaces/{wanted.space}, run {self._run.name}"
        return f"local, run {self._run.name} (trackio show --project {wanted.project})"

    def send(self, rows: Sequence[TrackedStep]) -> None:
        for row in rows:
            self._run.log(row.metrics, step=row.step)

    def close(self, outcome: Outcome) -> None:
        self._run.finish()


class Mlflow(RemoteTracker):
    """MLflow run; the package mlflow-skinny is enough."""

    package: ClassVar[str] = "mlflow"

    def open(self, run_id: str | None) -> str:
        for name, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        wanted = self._cfg.run.mlflow
        self._client: Any = MlflowClient(tracking_uri=self._uri)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._run = run_id
            return run_id
        if not self._run:
            found = self._client.get_experiment_by_name(wanted.experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(wanted.experiment)
            name = wanted.name or self._cfg.run.name
            self._run = str(self._client.create_run(experiment, run_name=name, tags=dict(wanted.tags)).info.run_id)
        params = [Param(_plain(key), str(value)[:PARAM_CHARS]) for key, value in _leaves(dump_tree(self._cfg))]
        for start in range(0, len(params), PARAMS_A_CALL):
            self._client.log_batch(self._run, params=params[start : start + PARAMS_A_CALL])
        return self._run

    @property
    def _uri(self) -> str:
        local = (self._run_dir.absolute().parent / "mlruns").as_uri()
        return self._cfg.run.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI") or local

    def where(self) -> str:
        return f"{self._uri}, experiment {self._cfg.run.mlflow.experiment}, run {self._run}"

    def send(self, rows: Sequence[TrackedStep]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_plain(name), value, int(row.unix_time * 1000), row.step)
            for row in rows
            for name, value in row.metrics.items()
        ]
        for start in range(0, len(metrics), METRICS_A_CALL):
            self._client.log_batch(self._run, metrics=metrics[start : start + METRICS_A_CALL])

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._run, MLFLOW_STATUS[outcome])


def _plain(name: str) -> str:
    """Replaces characters that an MLflow server refuses in a name."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}".removeprefix("."))
    else:
        yield key, tree
