"""Weights & Biases tracker: `run.trackers: [wandb]`, with the keys of `run.wandb`.

The API key comes from WANDB_API_KEY or `wandb login`. Offline, `wandb sync` sends the folder later.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mrl.config.loader import dump_tree
from mrl.config.schema import AnyConfig
from mrl.observe.remote_tracker import Outcome, RemoteTracker, TrackedStep

INIT_S = 60.0


class Wandb(RemoteTracker):
    """Weights & Biases run whose curves are drawn over a metric of its own, `step`.

    wandb rejects a step that it has seen, and a run resumed from a checkpoint repeats some.
    """

    package: ClassVar[str] = "wandb"

    def __init__(self, cfg: AnyConfig, run_dir: Path) -> None:
        self._cfg, self._run_dir = cfg, run_dir
        self._run: Any = None

    def open(self, run_id: str | None) -> str:
        import wandb

        wanted, run = self._cfg.run.wandb, self._cfg.run
        made = run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=wanted.project,
            entity=wanted.entity,
            name=wanted.name or run.name,
            group=wanted.group,
            tags=list(wanted.tags),
            mode=wanted.mode,
            id=made,
            resume="allow",
            dir=str(self._run_dir.absolute()),
            config=dump_tree(self._cfg),
            settings=wandb.Settings(console="off", silent=True, init_timeout=INIT_S),
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
