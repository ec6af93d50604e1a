"""trackio tracker: `run.trackers: [trackio]`, with the keys of `run.trackio`.

Metrics go to a local database (TRACKIO_DIR), which `trackio show` displays, or to a Space of the Hugging Face hub.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from mrl.config.loader import dump_tree
from mrl.config.schema import AnyConfig
from mrl.observe.remote_tracker import Outcome, RemoteTracker, TrackedStep


class Trackio(RemoteTracker):
    """trackio run. trackio resumes runs by name, so the name is unique and is the run's id."""

    package: ClassVar[str] = "trackio"

    def __init__(self, cfg: AnyConfig, run_dir: Path) -> None:
        self._cfg = cfg
        self._run: Any = None

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
