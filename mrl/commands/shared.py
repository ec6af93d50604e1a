"""Arguments and checks that several subcommands share."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.problems import ConfigError
from mrl.redaction import redact

if TYPE_CHECKING:
    from mrl.config.derived import Machine
    from mrl.config.schema import AnyConfig, Config

CONFIG_ERROR = 2


class CommandError(Exception):
    """Ends a command; the message says why, in one line for the user."""

    exit_code = 1


class UsageError(CommandError):
    """Ends a command because of an argument that it cannot use."""

    exit_code = CONFIG_ERROR


def exit_code_of(command: Callable[[], int]) -> int:
    """Runs a command. Returns its exit code; prints the reason if the command cannot go on."""
    try:
        return command()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CONFIG_ERROR
    except CommandError as error:
        print(f"mrl: {error}", file=sys.stderr)
        return error.exit_code


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises CommandError if the block cannot write to `path`."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from error


def add_config(parser: argparse.ArgumentParser, example: str) -> None:
    """Adds CONFIG and KEY=VALUE..., as `args.config` and `args.overrides`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=f"overrides, such as {example}")


def load_read_only(config: Path, overrides: Sequence[str]) -> AnyConfig:
    """Loads a configuration file, or that of a run directory wherever it is now, for a command that only reads.

    Raises ConfigError.
    """
    from mrl.config.loader import load

    if not config.is_dir():
        return load(config, overrides, planned=whole_world)
    place = config.resolve()
    here = [f"run.root={json.dumps(str(place.parent))}", f"run.name={json.dumps(place.name)}"]
    return load(config / "config.yaml", [*here, *overrides], planned=whole_world)


def whole_world(cfg: AnyConfig) -> Machine:
    """Returns the run's whole world, over all its machines."""
    from mrl.config.derived import Machine

    return replace(Machine.for_launch(cfg, nodes=cfg.run.nodes or 1), alone=False)


def add_nodes(parser: argparse.ArgumentParser) -> None:
    """Adds --nodes, --node and --head: this node's place among several."""
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument("--node", type=int, metavar="K", help="number of this node; node 0 is the head")
    parser.add_argument("--head", metavar="HOST:PORT", help="address on which node 0 listens")


def check_node_arguments(args: argparse.Namespace) -> None:
    """Raises UsageError for --nodes, --node and --head that do not go together."""
    if args.nodes == 1 and args.node is None and args.head is None:
        return
    if args.nodes < 2 or args.node is None or args.head is None:
        raise UsageError("--nodes N (2 or more), --node K and --head HOST:PORT go together")
    if not 0 <= args.node < args.nodes:
        raise UsageError(f"--node {args.node}: nodes are numbered from 0 to {args.nodes - 1}")
    host, _, port = args.head.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise UsageError(f"--head {args.head}: must be HOST:PORT, such as node17:29500")


def refuse_given(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raises UsageError for the first of these optional arguments that was given, which `why` says cannot be."""
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {why}: leave it out")


def load_for_eval(args: argparse.Namespace) -> Config:
    """Returns the configuration that `mrl eval` evaluates. Raises ConfigError and UsageError."""
    from mrl.config.schema import Config

    cfg = load_read_only(args.config, args.overrides)
    if not isinstance(cfg, Config):
        raise UsageError(f"mrl eval supports language models only, and this is trainer {cfg.trainer}")
    if args.weights is not None and not args.weights.is_dir():
        raise UsageError(f"--weights {args.weights}: there is no such directory")
    if several := cfg.adapter_configs():
        raise UsageError(
            f"mrl eval evaluates one model, and this run trains the adapters {', '.join(several)}: merge one with mrl "
            "merge, and evaluate it by --weights and a configuration of it alone, without the section adapters"
        )
    return cfg


def check_gpu_kind(kind: str | None) -> None:
    """Raises UsageError for a --gpu KIND that is not known."""
    from mrl.plan.chips import KINDS

    if kind is not None and kind not in KINDS:
        raise UsageError(f"--gpu {kind}: expected one of {', '.join(KINDS)}")


def require_one_process() -> None:
    """Raises UsageError if a launcher started this process of `mrl eval` beside others."""
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UsageError(f"WORLD_SIZE={size}: mrl eval runs in one process: start it without torchrun")


def has_problems(cfg: AnyConfig, machine: Machine) -> bool:
    """Prints all problems that preflight finds, or else its warnings about the tokenizer; returns True for problems.

    In a joined world rank 0 checks, and the first rank of every other node checks its own machine. Ranks whose launcher
    `mrl train` has checked, and restarted ranks, check nothing. A planned world skips memory, which its plan covers.
    """
    from mrl.config.schema import Config
    from mrl.ports import MEETING_VARIABLE
    from mrl.preflight.checks import NODE_CHECKS, RUN_CHECKS, check_machine, run_checks
    from mrl.preflight.finding import problems
    from mrl.preflight.memory import check_memory
    from mrl.resilience.protocol import attempt

    checks = (*RUN_CHECKS, *NODE_CHECKS)
    if machine.joined:
        if MEETING_VARIABLE in os.environ or attempt() or os.environ.get("LOCAL_RANK", "0") != "0":
            return False
        checks = checks if os.environ["RANK"] == "0" else NODE_CHECKS
    is_counted = not machine.planned and checks != NODE_CHECKS
    of_memory = check_memory(cfg, machine) if isinstance(cfg, Config) and is_counted else ()
    found = [*run_checks(cfg, checks), *of_memory, *check_machine()]
    wrong = problems(found)
    node = f"{socket.gethostname()}: " if machine.joined else ""
    of_ends = [each for each in found if each.check == "tokenizer" and each.verdict == "warning"]
    for finding in wrong or of_ends:
        print(node + redact(str(finding)), file=sys.stderr)
    return bool(wrong)
