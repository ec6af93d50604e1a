"""MLflow tracker: `run.trackers: [mlflow]`, with the keys of `run.mlflow`. The package mlflow-skinny is enough.

User and password, or token, come from the environment (MLFLOW_TRACKING_USERNAME and the like).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mrl.config.loader import dump_tree
from mrl.config.schema import AnyConfig
from mrl.observe.remote_tracker import Outcome, RemoteTracker, TrackedStep

METRICS_A_CALL, PARAMS_A_CALL, PARAM_CHARS = 1000, 100, 500  # limits of a server
ENVIRONMENT = {  # defaults; MLflow fails at once, since the sender retries by itself
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_ALLOW_FILE_STORE": "true",
}
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Mlflow(RemoteTracker):
    package: ClassVar[str] = "mlflow"

    def __init__(self, cfg: AnyConfig, run_dir: Path) -> None:
        self._cfg = cfg
        local = (run_dir.absolute().parent / "mlruns").as_uri()
        self._uri = cfg.run.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI") or local
        self._client: Any = None
        self._run_id = ""

    def open(self, run_id: str | None) -> str:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._run_id = run_id
            return run_id
        if not self._run_id:
            self._run_id = self._new_run()
        self._log_config()
        return self._run_id

    def _new_run(self) -> str:
        wanted = self._cfg.run.mlflow
        found = self._client.get_experiment_by_name(wanted.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(wanted.experiment)
        made = self._client.create_run(experiment, run_name=wanted.name or self._cfg.run.name, tags=dict(wanted.tags))
        return str(made.info.run_id)

    def where(self) -> str:
        return f"{self._uri}, experiment {self._cfg.run.mlflow.experiment}, run {self._run_id}"

    def send(self, rows: Sequence[TrackedStep]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_plain(name), value, int(row.unix_time * 1000), row.step)
            for row in rows
            for name, value in row.metrics.items()
        ]
        for start in range(0, len(metrics), METRICS_A_CALL):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + METRICS_A_CALL])

    def close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._run_id, STATUS[outcome])

    def _log_config(self) -> None:
        from mlflow.entities import Param

        params = [Param(_plain(key), str(value)[:PARAM_CHARS]) for key, value in _leaves(dump_tree(self._cfg))]
        for start in range(0, len(params), PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_A_CALL])


def _plain(name: str) -> str:
    """Replaces characters that a server refuses in a name."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}".removeprefix("."))
    else:
        yield key, tree
