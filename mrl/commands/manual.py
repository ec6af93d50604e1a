"""`mrl config`: keys of a configuration, with defaults and meaning."""

from __future__ import annotations

import argparse
from typing import Any

from mrl.commands import shared


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser("config", help="show configuration keys with their defaults and meaning")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("key", nargs="?", metavar="SECTION|KEY", help="such as rollout or actor.optimizer.lr")
    what.add_argument("--markdown", action="store_true", help="print all keys as Markdown (docs/configuration.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows a section or key; without one, the list of sections."""
    from mrl.config import manual

    try:
        print(manual.markdown() if args.markdown else manual.text(args.key), end="" if args.markdown else "\n")
    except manual.UnknownKey as error:
        raise shared.UsageError(str(error)) from None
    return 0
