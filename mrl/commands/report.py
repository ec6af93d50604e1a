"""`mrl report`: writes a run's page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mrl.commands.shared import CommandError, UsageError

EVERY_S = 10.0


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser("report", help="write a run's report: an HTML page and the reward curve")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--follow", action="store_true", help="update the report until the run ends")
    parser.add_argument(
        "--every-s", type=float, metavar="S", help=f"with --follow: seconds between updates ({EVERY_S:g})"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Writes the report and prints answers before and after training.

    With --follow it rewrites the report until the run ends, or until Ctrl-C. Returns 1 if there is no run, or one of
    its files is broken.
    """
    if args.every_s is not None and not args.follow:
        raise UsageError("--every-s needs --follow")
    run_dir, every_s = args.run_dir, EVERY_S if args.every_s is None else args.every_s
    if not run_dir.is_dir() or not any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        what = "contains no run" if run_dir.is_dir() else "is not a directory"
        print(f"{run_dir} {what}: expected a run directory, such as runs/NAME", file=sys.stderr)
        return 1
    from mrl.observe import UnreadableFile, before_after_table, follow_run, write_report

    try:
        if args.follow:
            print(f"mrl: {follow_run(run_dir, max(0.5, every_s), print)}")
        page = write_report(run_dir)
        before_after_table(run_dir)
    except KeyboardInterrupt:
        if not args.follow:
            raise
        page = write_report(run_dir)
    except (UnreadableFile, OSError) as error:
        raise CommandError(str(error)) from error
    print(f"run      {run_dir}")
    print(f"report   {page}")
    if (picture := run_dir / "reward_curve.png").exists():  # once there is something to draw
        print(f"picture  {picture}")
    return 0
