"""`mrl preflight`: everything that would stop a run, in one table, before it starts."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mrl.commands import shared, world

if TYPE_CHECKING:
    from mrl.config.derived import Machine
    from mrl.config.schema import Config
    from mrl.preflight.finding import Finding


def add(commands: Any) -> None:
    """The subcommand's arguments."""
    parser = commands.add_parser("preflight", help="look for everything that would stop a run, before it starts")
    shared.add_config(parser, "run.root=/scratch/runs")
    parser.add_argument("--ranks", type=int, metavar="N", help="of the whole world, if other nodes take part")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="of these, on this machine (default: all)")
    parser.add_argument("--gpu", metavar="KIND", help="count memory for such GPUs, as mrl plan, if not for those here")
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows all that is wrong, in one table. Exit code 2: the configuration is wrong; 1: something else is."""
    from mrl.config.derived import Machine
    from mrl.config.loader import ConfigError, load
    from mrl.plan.chips import KINDS
    from mrl.preflight import network, show
    from mrl.preflight.finding import problems
    from mrl.preflight.look import look, look_at_machine, of_configuration
    from mrl.preflight.memory import look_at_memory

    source = str(args.config)
    if args.gpu is not None and args.gpu not in KINDS:
        print(f"mrl: --gpu {args.gpu}: expected one of {', '.join(KINDS)}", file=sys.stderr)
        return shared.CONFIG_ERROR
    if args.network:
        return network.main(args.mib, args.at_least, as_json=args.json)
    gpus = world.gpus()
    machine = _planned(args, gpus)
    try:
        cfg = load(args.config, args.overrides, joined=machine, gpus=gpus)
    except ConfigError as error:
        findings, code = [*of_configuration(error), *_memory_all_the_same(args, machine)], shared.CONFIG_ERROR
    else:
        memory = look_at_memory(cfg, machine or Machine.starting(cfg, gpus), args.gpu)
        findings, code = [*of_configuration(None), *look(cfg), *memory], 0
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


def _planned(args: argparse.Namespace, gpus: int) -> Machine | None:
    """The world of --ranks; None: the one that `mrl train` would start on this machine."""
    from mrl.config.derived import Machine

    return None if args.ranks is None else Machine(args.ranks, args.ranks_per_node or args.ranks, gpus, joined=True)


def _memory_all_the_same(args: argparse.Namespace, machine: Machine | None) -> list[Finding]:
    """Where files alone are wrong, of which a plan needs config.json only."""
    from mrl.config.derived import Machine
    from mrl.config.loader import ConfigError, load
    from mrl.plan.plan import machine_of
    from mrl.preflight.memory import look_at_memory

    def planned(cfg: Config) -> Machine:
        world = machine or Machine.starting(cfg)
        return machine_of(cfg, world.world_size, world.local_world_size)

    try:
        cfg = load(args.config, args.overrides, planned=planned)
    except ConfigError:
        return []
    return list(look_at_memory(cfg, planned(cfg), args.gpu))
