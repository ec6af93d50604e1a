"""SwanLab tracker: `run.trackers: [swanlab]`, with the keys of `run.swanlab`.

The API key comes from SWANLAB_API_KEY or `swanlab login`. Offline, `swanlab sync` sends the folder later.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from mrl.config.loader import dump_tree
from mrl.config.schema import AnyConfig
from mrl.observe.remote_tracker import Outcome, RemoteTracker, TrackedStep

STATES: dict[Outcome, Literal["success", "aborted", "crashed"]] = {
    "finished": "success",
    "stopped": "aborted",
    "failed": "crashed",
}


class SwanLab(RemoteTracker):
    package: ClassVar[str] = "swanlab"

    def __init__(self, cfg: AnyConfig, run_dir: Path) -> None:
        self._cfg, self._run_dir = cfg, run_dir
        self._run: Any = None

    def open(self, run_id: str | None) -> str:
        import swanlab

        wanted, run = self._cfg.run.swanlab, self._cfg.run
        made, folder = run_id or secrets.token_hex(8), self._run_dir.absolute() / "swanlab"
        folder.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=wanted.project,
            workspace=wanted.workspace,
            name=wanted.name or run.name,
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
        self._run.finish(state=STATES[outcome], error="the run failed" if outcome == "failed" else None)
