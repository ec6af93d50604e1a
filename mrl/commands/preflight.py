"""`mrl preflight`: one table of everything that would stop a run, before it starts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from mrl.commands import shared, world
from mrl.config.problems import ConfigError

if TYPE_CHECKING:
    from mrl.config.derived import Machine
    from mrl.config.schema import AnyConfig
    from mrl.preflight.finding import Finding

OF_CHECKS = ("ranks", "ranks_per_node", "gpu", "node", "head", "names", "wait_s")  # arguments without --network
MEET_S = 120.0  # nodes may import torch from a shared disk first


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser("preflight", help="find everything that would stop a run, before it starts")
    shared.add_config(parser, "run.root=/scratch/runs")
    parser.add_argument("--ranks", type=int, metavar="N", help="world size, if other nodes take part")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="those on this machine (default: all)")
    parser.add_argument("--gpu", metavar="KIND", help="check memory for such GPUs (see mrl plan), not for those here")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    shared.add_nodes(parser)
    parser.add_argument("--names", metavar="A,B,...", help="with --nodes: names of the nodes in messages")
    parser.add_argument(
        "--wait-s",
        type=float,
        metavar="S",
        help=f"with --nodes: seconds to wait for all nodes (default: {MEET_S:g})",
    )
    parser.add_argument(
        "--network", action="store_true", help="only measure an all-reduce: run on every rank by torchrun or srun"
    )
    parser.add_argument("--mib", type=int, metavar="N", help="with --network or --nodes: size (256; 16 without GPUs)")
    parser.add_argument("--at-least", type=float, metavar="GB_PER_S", help="with --network or --nodes: required speed")
    parser.description = (
        "Reports everything that mrl train would refuse, all at once, and starts no part of the run. Exit code 0: "
        "ready; 2: the configuration is wrong; 1: another problem. With --nodes, run it on every node: it also "
        "reports nodes that do not join and problems of other nodes, and measures all-reduces between nodes."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows all problems in one table. Returns 2 for a wrong configuration, 1 for any other problem."""
    from mrl.launcher import NodeRank
    from mrl.preflight import network, nodes

    if args.network:
        why = "does not go with --network, which only measures an all-reduce"
        shared.refuse_given(args, ("nodes", *OF_CHECKS) if args.nodes != 1 else OF_CHECKS, why)
        return network.main(args.mib, args.at_least, as_json=args.json)
    _check(args)
    findings, is_configured = _found(args)
    if args.nodes == 1:
        return _show(args, findings, is_configured)
    node, names = NodeRank(args.node, args.nodes, args.head), [*filter(None, (args.names or "").split(","))]
    rendezvous = nodes.NodeRendezvous(node, names, MEET_S if args.wait_s is None else args.wait_s)
    findings += nodes.check_nodes(rendezvous, findings, args.mib, args.at_least)
    code = _show(args, findings, is_configured)
    rendezvous.leave()
    return code


def _found(args: argparse.Namespace) -> tuple[list[Finding], bool]:
    """Returns this node's findings and whether the configuration is valid. Only the first of several nodes checks what
    all nodes share."""
    from mrl.config.derived import Machine
    from mrl.config.loader import load
    from mrl.config.schema import Config
    from mrl.preflight.checks import NODE_CHECKS, RUN_CHECKS, check_machine, configuration_findings, run_checks
    from mrl.preflight.memory import check_memory

    gpus, machine = world.gpus(), None  # the world that `mrl train` would start on this machine
    if args.ranks is not None:
        machine = Machine(args.ranks, args.ranks_per_node or args.ranks, gpus, joined=True)
    starting = world.machine_on_nodes(args.nodes, gpus) if args.nodes > 1 else None
    try:
        cfg = load(args.config, args.overrides, joined=machine, planned=starting, gpus=gpus)
    except ConfigError as error:
        return [*configuration_findings(error), *_memory_all_the_same(args, machine), *check_machine()], False
    machine = machine or (starting(cfg) if starting is not None else Machine.for_launch(cfg, gpus))
    checks = NODE_CHECKS if args.node else (*RUN_CHECKS, *NODE_CHECKS)
    memory = check_memory(cfg, machine, args.gpu) if isinstance(cfg, Config) else ()
    return [*configuration_findings(None), *run_checks(cfg, checks), *memory, *check_machine()], True


def _show(args: argparse.Namespace, findings: list[Finding], is_configured: bool) -> int:
    from rich.console import Console

    from mrl.preflight.finding import as_json, problems, table, verdict

    source, code = str(args.config), int(bool(problems(findings))) if is_configured else shared.CONFIG_ERROR
    if args.json:
        print(as_json(findings, source, code), flush=True)
        return code
    console = Console()
    console.print(table(findings, source))
    console.print(verdict(findings))
    return code


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for arguments that do not go together."""
    shared.check_gpu_kind(args.gpu)
    if any(number is not None and number < 1 for number in (args.ranks, args.ranks_per_node)):
        raise shared.UsageError("--ranks and --ranks-per-node must be at least 1")
    if args.ranks_per_node is not None and args.ranks is None:
        raise shared.UsageError("--ranks-per-node needs --ranks")
    if args.nodes == 1:
        shared.refuse_given(args, ("names", "wait_s"), "needs --nodes")
        shared.refuse_given(args, ("mib", "at_least"), "needs --network or --nodes, which measure all-reduces")
    if args.nodes > 1 and args.ranks is not None:
        raise shared.UsageError("--ranks checks this machine alone, --nodes all nodes together: give one of them")
    shared.check_node_arguments(args)


def _memory_all_the_same(args: argparse.Namespace, machine: Machine | None) -> list[Finding]:
    """Memory findings if only files are wrong, since a plan needs config.json alone."""
    from mrl.config.derived import Machine
    from mrl.config.loader import load
    from mrl.config.schema import Config
    from mrl.plan.plan import machine_of
    from mrl.preflight.memory import check_memory

    def planned(cfg: AnyConfig) -> Machine:
        whole = machine or Machine.for_launch(cfg, nodes=args.nodes)
        return machine_of(cfg, whole.world_size, whole.local_world_size)

    try:
        cfg = load(args.config, args.overrides, planned=planned)
    except ConfigError:
        return []
    return list(check_memory(cfg, planned(cfg), args.gpu)) if isinstance(cfg, Config) else []
