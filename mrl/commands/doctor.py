"""`mrl doctor`: shows what this machine can do, and the remedy for each gap."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any


def add(commands: Any) -> None:
    """Adds the subcommand, which has no arguments."""
    parser = commands.add_parser("doctor", help="show what this machine can run and how to install what is missing")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table. Returns exit code 0 always."""
    if find_spec("torch") is None:
        from mrl.packages import pip_install

        print(f"torch is not installed, and every command of mrl needs it: {pip_install('torch')}")
        return 0
    from mrl import doctor

    return doctor.main()
