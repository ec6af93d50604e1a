"""`mrl doctor`: what is installed here, and what works."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """The subcommand, which has no arguments."""
    parser = commands.add_parser("doctor", help="what is installed here, what it is used for, what happens without it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints what is installed and what works here. Always exit code 0."""
    from rich.console import Console

    from mrl.platform import Feature, doctor_table
    from mrl.reward import sandbox

    (version, problem), unbound = sandbox.found(), sandbox.groups.problem()
    without = "such rewards are refused, unless reward.code.isolation is none"
    row = Feature("bubblewrap", version, "reward code: shuts in the programs that a model wrote", without, problem)
    bound = "reward code: the kernel's own bound on a program's memory and processes"
    group = Feature("control groups", "found", bound, "limits of each process, not of the kernel's buffers", unbound)
    Console().print(doctor_table([row, group]))
    return 0
