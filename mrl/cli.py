"""The `mrl` command."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence

from mrl import __version__
from mrl.commands import data, doctor, manual, plan, report, train
from mrl.commands.shared import CONFIG_ERROR
from mrl.weights import command as weights

COMMANDS = (train.add, plan.add, data.add, manual.add, report.add, weights.add_parsers, doctor.add)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code. argv: None in a process that is here for nothing else."""
    try:
        return _run(sys.argv[1:] if argv is None else argv, is_program=argv is None)
    except KeyboardInterrupt:
        print("mrl: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(argv: Sequence[str], is_program: bool) -> int:
    for word in argv:
        if re.search("[\ud800-\udfff]", word):
            print(f"mrl: an argument is not UTF-8: {os.fsencode(word)!r}", file=sys.stderr)
            return CONFIG_ERROR
    args = _parser().parse_args(argv, argparse.Namespace(is_program=is_program))
    exit_code: int = args.run(args)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrl", description="Reinforcement learning for language models on Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"mrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser
