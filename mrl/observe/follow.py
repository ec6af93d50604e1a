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
        goes_on, state = is_owned(run_dir / "lock"), _state(run_dir)
        if state != seen or not goes_on:
            page = write_report(run_dir, refresh_s=every_s if goes_on else None)
            if (step := _last_step(run_dir)) != written:
                say(f"step {step}: {page}")
            seen, written = state, step
        if not goes_on:
            return _why(run_dir)
        time.sleep(every_s)


def _why(run_dir: Path) -> str:
    step, total = _last_step(run_dir), read_config(run_dir)[1].get("run", {}).get("steps")
    return f"the run has finished its {total} steps" if step == total else f"the run is not active; last step: {step}"


def _last_step(run_dir: Path) -> int:
    rows = read_metrics(run_dir)
    return int(rows[-1]["step"]) if rows else 0


def _state(run_dir: Path) -> list[int]:
    """Modification times that change with the page's content."""
    files = [run_dir / name for name in WATCHED]
    return [file.stat().st_mtime_ns if file.exists() else 0 for file in files]
