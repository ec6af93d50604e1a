"""`mrl preflight`, and what `mrl train` looks at first. Imports torch when it runs, not before."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.redaction import redact

if TYPE_CHECKING:
    from mrl.config.derived import Machine
    from mrl.config.schema import Config

WRONG_CONFIGURATION = 2


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("preflight", help="look for everything that would stop a run, before it starts")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as run.root=/scratch/runs")
    parser.add_argument("--ranks", type=int, metavar="N", help="of the whole world, if other nodes take part")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="of these, on this machine (default: all)")
    parser.add_argument("--json", action="store_true", help="for programs, instead of the table")
    parser.add_argument(
        "--network", action="store_true", help="run by torchrun or srun as every rank: measures an all-reduce instead"
    )
    parser.add_argument("--mib", type=int, default=256, metavar="N", help="with --network: size of it (default: 256)")
    parser.add_argument("--at-least", type=float, metavar="GB_PER_S", help="with --network: less is a problem")
    parser.description = (
        "Starts nothing of the run. Exit code 0: ready; 2: the configuration is wrong; 1: something else is. What mrl "
        "train refuses is found here, all at once."
    )


def main(args: argparse.Namespace, count_gpus: Callable[[], int]) -> int:
    """Shows all that is wrong, in one table. Exit code 2: the configuration is wrong; 1: something else is."""
    from mrl.config.loader import ConfigError, load
    from mrl.preflight import network, show
    from mrl.preflight.finding import problems
    from mrl.preflight.look import look, look_at_machine, of_configuration

    source = str(args.config)
    if args.network:
        return network.main(args.mib, args.at_least, as_json=args.json)
    try:
        load(args.config, args.overrides, joined=_planned(args, None))  # before torch is imported
        cfg = load(args.config, args.overrides, joined=_planned(args, count_gpus()), gpus=count_gpus())
    except ConfigError as error:
        findings, code = of_configuration(error), WRONG_CONFIGURATION
    else:
        findings, code = [*of_configuration(None), *look(cfg)], 0
    findings += look_at_machine()
    code = code or int(bool(problems(findings)))
    if args.json:
        print(show.as_json(findings, source, code))
        return code
    from rich.console import Console

    console = Console()
    console.print(show.table(findings, source))
    console.print(show.verdict(findings))
    return code


def _planned(args: argparse.Namespace, gpus: int | None) -> Machine | None:
    """The world of --ranks; None: the one that `mrl train` would start on this machine."""
    from mrl.config.derived import Machine

    return None if args.ranks is None else Machine(args.ranks, args.ranks_per_node or args.ranks, gpus, joined=True)


def is_refused(cfg: Config, in_a_world: bool) -> bool:
    """Says all that preflight finds wrong. Of a world's ranks rank 0 looks, and for its own machine the first one of
    every other node; not those whose launcher `mrl train` has looked before it started them, nor restarted ones."""
    from mrl.ports import MEETING_VARIABLE
    from mrl.preflight.finding import problems
    from mrl.preflight.look import OF_NODE, OF_RUN, look, look_at_machine
    from mrl.resilience.protocol import attempt

    looks = (*OF_RUN, *OF_NODE)
    if in_a_world:
        if MEETING_VARIABLE in os.environ or attempt() or os.environ.get("LOCAL_RANK", "0") != "0":
            return False
        looks = looks if os.environ["RANK"] == "0" else OF_NODE
    wrong = problems([*look(cfg, looks), *look_at_machine()])
    node = f"{socket.gethostname()}: " if in_a_world else ""
    for finding in wrong:
        print(node + redact(str(finding)), file=sys.stderr)
    return bool(wrong)
