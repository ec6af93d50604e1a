"""`mrl profile`: trains a few steps under a profiler."""

from __future__ import annotations

import argparse
from typing import Any

from mrl.commands import shared, train


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser("profile", help="train a few steps under a profiler")
    shared.add_config(parser, "run.nproc=4")
    parser.add_argument("--steps", default="2", metavar="N,N", help="steps to profile, counted from 1 (default: 2)")
    parser.add_argument("--ranks", default="0", metavar="N,N", help="ranks to profile (default: 0)")
    parser.add_argument("--nsys", action="store_true", help="use NVIDIA Nsight Systems instead of torch's profiler")
    parser.description = (
        "Trains up to the last of these steps as a separate run, NAME-profile, which writes neither checkpoints nor "
        "weights. Its folder profile/ gets a trace and a table of the ten largest operations for each step and rank; "
        "with --nsys its folder logs/ gets reports of Nsight Systems, which must be installed. "
        "To profile steps of an ordinary run, set run.profile: see mrl config run.profile."
    )
    parser.set_defaults(run=run, **train.ALONE)


def run(args: argparse.Namespace) -> int:
    """Trains a separate run under the profiler. Exit codes are those of `mrl train`."""
    from mrl.config.loader import load

    name = load(args.config, args.overrides).run.name
    try:
        steps = [int(step) for step in args.steps.split(",")]
    except ValueError:
        raise shared.UsageError(f"--steps {args.steps}: expected numbers such as 2 or 2,3") from None
    own = [f"run.name={name}-profile", "run.existing=move_aside"]
    tool = "nsys" if args.nsys else "torch"
    args.overrides += [*own, f"run.profile={{tool: {tool}, steps: {steps}, ranks: [{args.ranks}], alone: true}}"]
    return train.run(args)
