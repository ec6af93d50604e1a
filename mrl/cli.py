"""The `mrl` command."""

from __future__ import annotations

import argparse
import datetime  # noqa: F401 - pydantic's core imports it, and panics if Ctrl-C comes in the midst of that
import os
import re
import select
import signal
import sys
from collections.abc import Sequence

from mrl import __version__
from mrl.commands import (
    data,
    doctor,
    evaluate,
    evaluate_reward,
    manual,
    plan,
    preflight,
    profile,
    report,
    serve,
    train,
    weights,
)
from mrl.commands.shared import CONFIG_ERROR, exit_code_of

COMMANDS = (
    train.add,
    serve.add,
    plan.add,
    preflight.add,
    data.add,
    manual.add,
    report.add,
    evaluate.add,
    evaluate_reward.add,
    profile.add,
    weights.add_parsers,
    doctor.add,
)

STDOUT = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code. argv: None in a process that exists for this command alone."""
    try:
        exit_code = _run(sys.argv[1:] if argv is None else argv, is_program=argv is None)
        print(end="", flush=True)
        return exit_code
    except BrokenPipeError:
        if not _is_unread():
            raise
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("mrl: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def _is_unread() -> bool:
    """True if the reader of stdout has gone, as with `head`; the rest of the output is then dropped."""
    end = select.poll()
    end.register(STDOUT, 0)
    is_unread = bool(end.poll(0))
    if is_unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return is_unread


def _run(argv: Sequence[str], is_program: bool) -> int:
    for word in argv:
        if re.search("[\ud800-\udfff]", word):
            print(f"mrl: an argument is not UTF-8: {os.fsencode(word)!r}", file=sys.stderr)
            return CONFIG_ERROR
    args = _parsed(argv, is_program)
    return exit_code_of(lambda: args.run(args))


def _parsed(argv: Sequence[str], is_program: bool) -> argparse.Namespace:
    """Parses arguments; overrides may follow options, which argparse alone rejects. A two-word command counts as one
    word."""
    if " ".join(argv[:2]) == evaluate_reward.NAME:
        argv = [evaluate_reward.NAME, *argv[2:]]
    parser, args = _parser(), argparse.Namespace(is_program=is_program)
    args, rest = parser.parse_known_args(argv, args)
    if any(word.startswith("-") or not hasattr(args, "overrides") for word in rest):
        parser.parse_args(argv)
    if rest:
        args.overrides += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrl",
        description="Reinforcement learning for language models on Megatron-Core.",
        epilog="`mrl COMMAND --help` shows the arguments of a command.",
    )
    parser.add_argument("--version", action="version", version=f"mrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser
