"""Rewrites the report of a run while the run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mrl.observe.files import METRICS, read_config
from mrl.observe.lock import is_owned
from mrl.observe.metrics import read_metrics
from mrl.observe.report import write_report

WATCHED = (METRICS, "rollouts", "config.yaml")


def follow_run(run_dir: Path, every_s: float, say: Callable[[str], None]) -> str:
    """Writes the page at once and after every change until the run ends; returns the reason for which it counts as
    ended.

    A run has ended when no process owns it, or its last step is logged. Raises UnreadableFile.
    """
    seen, written = None, None
    while True:
        watched = [run_dir / name for name in WATCHED]
        goes_on = is_owned(run_dir / "lock")
        state = [file.stat().st_mtime_ns if file.exists() else 0 for file in watched]
        if state != seen or not goes_on:
            page = write_report(run_dir, refresh_s=every_s if goes_on else None)
            if (step := _last_step(run_dir)) != written:
                say(f"step {step}: {page}")
            seen, written = state, step
        if not goes_on:
            step, total = _last_step(run_dir), read_config(run_dir)[1].get("run", {}).get("steps")
            is_over = f"the run has finished its {total} steps"
            return is_over if step == total else f"the run is not active; last step: {step}"
        time.sleep(every_s)


def _last_step(run_dir: Path) -> int:
    rows = read_metrics(run_dir)
    return int(rows[-1]["step"]) if rows else 0
